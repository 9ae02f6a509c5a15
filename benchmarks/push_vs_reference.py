"""A checkpoint on disk into a running vLLM: the reference script and ``streamer push``, same run.

    python benchmarks/push_vs_reference.py --url http://127.0.0.1:8000 --checkpoint FOLDER \
        --script rlhf_http_nccl_no_vllm.py [--repeats 5] [--json FILE]

Prints medians of seconds, phase by phase. Both read the files from the page cache. ``wall`` is the
whole command, from a cold start of Python; the script's also generates four completions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
MIB = 1 << 20


def run(command: list[str]) -> tuple[str, float]:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    for file in Path(arguments.checkpoint).glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(64 * MIB):
                pass
    results: dict[str, dict[str, float]] = {}
    for mode, buffer_size in (("per tensor", None), ("packed 256 MiB", 256 * MIB)):
        for who, measure in (("reference", reference), ("streamer", streamer)):
            runs = [measure(arguments, buffer_size) for _ in range(arguments.repeats)]
            results[f"{who}, {mode}"] = {
                phase: statistics.median(each[phase] for each in runs) for phase in runs[0]
            }
    print(f"{'seconds, median of ' + str(arguments.repeats):28} load  connect  update    wall")
    for name, row in results.items():
        cells = "  ".join(f"{row[phase]:6.2f}" for phase in ("load", "connect", "update", "wall"))
        print(f"{name:26} {cells}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
