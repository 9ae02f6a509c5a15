"""A checkpoint on disk into a running vLLM: the reference script and ``streamer push``, same run.

    python benchmarks/push_vs_reference.py --url http://127.0.0.1:8000 --checkpoint FOLDER \
        --script rlhf_http_nccl_no_vllm.py [--repeats 5] [--modes packed,per-tensor] [--json FILE] \
        [--trace PREFIX]

Prints medians of seconds, phase by phase. Both read the files from the page cache. ``wall`` is the
whole command, from a cold start of Python; the script's also generates four completions. The first
run of each is not counted: it writes the bytecode of what it imports, torch above all, into a
folder of its own. Where torch is installed without, Python would compile it anew for every run. The
last lines are of pushes in a session that is connected, from open to finish, against the script's
load and update and against the rate at which pinned memory goes to the device in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MIB = 1 << 20
BYTECODE = tempfile.TemporaryDirectory()
ENVIRONMENT = {**os.environ, "PYTHONPYCACHEPREFIX": BYTECODE.name}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)


def run(command: list[str]) -> tuple[str, float]:
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return done.stdout, time.perf_counter() - started


def reference(arguments: argparse.Namespace, buffer_size: int | None) -> dict[str, float]:
    command = [sys.executable, str(HERE / "reference_timer.py"), arguments.script]
    command += ["--url", arguments.url, "--checkpoint", arguments.checkpoint]
    if buffer_size is not None:
        command += ["--packed", "--packed-buffer-size-bytes", str(buffer_size)]
    output, wall = run(command)
    seconds: dict[str, float] = json.loads(output.splitlines()[-1])
    return {**seconds, "wall": wall}


def streamer(arguments: argparse.Namespace, buffer_size: int | None) -> dict[str, float]:
    command = [sys.executable, "-m", "streamer", "push", arguments.checkpoint]
    command += ["--to", arguments.url, "--json"]
    command += ["--per-tensor"] if buffer_size is None else ["--buffer-size", str(buffer_size)]
    output, wall = run(command)
    seconds = json.loads(output)["seconds"]
    update = seconds["update"] + seconds["finish"]
    return {"load": seconds["open"], "connect": seconds["connect"], "update": update, "wall": wall}


def connected(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of connected pushes, and GB/s of pinned memory to the device; in this process."""
    import torch

    import streamer as library

    results: dict[str, float] = {}
    for mode in arguments.modes.split(","):
        record = library.Trace(enabled=False)
        with library.connect(arguments.url, packed=mode == "packed", trace=record) as session:
            reports = [session.push(arguments.checkpoint) for _ in range(arguments.repeats + 1)]
            if arguments.trace:
                record.enabled = True
                session.push(arguments.checkpoint)
        if arguments.trace:
            record.write(f"{arguments.trace}-{mode}.json")
        totals = [report.seconds.total for report in reports[1:]]
        results[mode] = statistics.median(totals)
        results[f"{mode}, least"] = min(totals)
        results[f"{mode}, bytes"] = reports[0].bytes
    pinned = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(pinned, device="cuda")
    rates = []
    for _ in range(arguments.repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(4 * pinned.numel() / 1e9 / (time.perf_counter() - started))
    results["host to device, GB/s"] = statistics.median(rates)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", default="per-tensor,packed")
    parser.add_argument("--json")
    parser.add_argument("--trace", metavar="PREFIX", help="one more push of each mode, traced")
    parser.add_argument("--connected", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.connected:
        print(json.dumps(connected(arguments)))
        return
    for file in Path(arguments.checkpoint).glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(64 * MIB):
                pass
    results: dict[str, dict[str, float]] = {}
    for mode in arguments.modes.split(","):
        buffer_size = 256 * MIB if mode == "packed" else None
        for who, measure in (("reference", reference), ("streamer", streamer)):
            runs = [measure(arguments, buffer_size) for _ in range(arguments.repeats + 1)][1:]
            results[f"{who}, {mode}"] = {
                phase: statistics.median(each[phase] for each in runs) for phase in runs[0]
            }
    print(f"{'seconds, median of ' + str(arguments.repeats):28} load  connect  update    wall")
    for name, row in results.items():
        cells = "  ".join(f"{row[phase]:6.2f}" for phase in ("load", "connect", "update", "wall"))
        print(f"{name:26} {cells}")
    output, _ = run([sys.executable, *sys.argv, "--connected"])
    warm: dict[str, float] = json.loads(output.splitlines()[-1])
    results["connected"] = warm
    link = warm["host to device, GB/s"]
    print(f"pinned memory to the device: {link:.1f} GB/s")
    for mode in arguments.modes.split(","):
        script = results[f"reference, {mode}"]
        rate = warm[f"{mode}, bytes"] / 1e9 / warm[mode]
        faster = (script["load"] + script["update"]) / warm[mode]
        print(
            f"streamer, {mode}, connected: {warm[mode]:.3f} s, least {warm[f'{mode}, least']:.3f}, "
            f"{rate:.1f} GB/s, {rate / link:.0%} of that; {faster:.1f} times "
            "faster than the script's load and update"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
