"""Tensors on the GPU to a receiver that throws them away, against raw NCCL in the same run.

    CUDA_VISIBLE_DEVICES=1 python benchmarks/gpu_limits.py --checkpoint FOLDER --receiver-gpu 0

The tensors have the names, dtypes and shapes of ``--checkpoint``; nothing is read. Raw NCCL is
torch's own process group, which broadcasts as many bytes from one hot buffer in pieces of the chunk
size. Then ``--small`` tensors of 16 KiB, as a fine-grained mixture of experts has them. Prints
medians of connected syncs, and the device memory that the syncs took beside the tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import streamer

MIB = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def raw(port: int, rank: int, sizes: list[int], nbytes: int, repeats: int) -> dict[str, float]:
    """Seconds of raw broadcasts of ``nbytes`` bytes, by the size of a piece."""
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    result = {}
    for size in sizes:
        buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        seconds = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for start in range(0, nbytes, size):
                dist.broadcast(buffer[: min(size, nbytes - start)], 0)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        result[f"raw NCCL, {size // MIB} MiB"] = statistics.median(seconds[1:])
        del buffer
    dist.destroy_process_group()
    return result


def ours(
    url: str,
    tensors: dict[str, torch.Tensor],
    repeats: int,
    packed: bool,
    size: int,
    trace: str | None = None,
) -> tuple[float, float, float]:
    """Median seconds of the update and of the whole, and extra device memory in MiB."""
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    record = streamer.Trace(enabled=False)
    with streamer.connect(url, packed=packed, buffer_size=size, trace=record) as session:
        reports = [session.push(tensors) for _ in range(repeats + 1)]
        after, _ = torch.cuda.mem_get_info()
        if trace is not None:
            record.enabled = True
            session.push(tensors)
    if trace is not None:
        record.write(trace)
    updates = statistics.median(report.seconds.update for report in reports[1:])
    totals = statistics.median(report.seconds.total for report in reports[1:])
    return updates, totals, (before - after) / MIB


def start_server(gpu: str) -> tuple[subprocess.Popen[str], str]:
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
    if "NCCL_HOSTID" in environment:  # one GPU for both
        environment["NCCL_HOSTID"] = "receiver"
    command = [sys.executable, "-m", "streamer", "serve", "--port", "0", "--workers", "1"]
    command += ["--device", "cuda", "--discard", "--until-eof"]
    server = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    return server, line.split()[1].rstrip(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--receiver-gpu", default="0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", type=int, default=50_000)
    parser.add_argument("--json")
    parser.add_argument("--trace", metavar="PREFIX", help="one more push of each size, traced")
    parser.add_argument("--raw-peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    specs = streamer.open_source(arguments.checkpoint).specs()
    nbytes = sum(spec.nbytes for spec in specs)
    sizes = [64 * MIB, 256 * MIB, 1024 * MIB]
    if arguments.raw_peer:
        raw(int(arguments.raw_peer), 1, sizes, nbytes, arguments.repeats)
        return
    port = free_port()
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=arguments.receiver_gpu)
    command = [sys.executable, *sys.argv, "--raw-peer", str(port)]
    with subprocess.Popen(command, env=environment):
        results = raw(port, 0, sizes, nbytes, arguments.repeats)
    for what, seconds in results.items():
        print(f"{what:34} {seconds:.4f} s  {nbytes / 1e9 / seconds:6.1f} GB/s", flush=True)
    server, url = start_server(arguments.receiver_gpu)
    try:
        tensors = {s.name: torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in specs}
        for packed, size in [(True, size) for size in sizes] + [(False, 256 * MIB)]:
            mode = f"packed, {size // MIB} MiB" if packed else "per tensor"
            name = f"{size // MIB if packed else 0}"
            trace = f"{arguments.trace}-{name}.json" if arguments.trace else None
            update, total, extra = ours(url, tensors, arguments.repeats, packed, size, trace)
            results[f"streamer, {mode}"] = update
            results[f"streamer, {mode}, total"] = total
            results[f"streamer, {mode}, extra MiB"] = extra
            line = f"update {update:.4f} s  {nbytes / 1e9 / update:6.1f} GB/s  total {total:.4f} s"
            print(f"{'streamer, ' + mode:34} {line}  {extra:.0f} MiB more", flush=True)
        del tensors
        small = {
            f"model.layers.{i}.experts.w": torch.empty(8192, dtype=torch.bfloat16, device="cuda")
            for i in range(arguments.small)
        }
        for packed in (True, False):
            update, total, _ = ours(url, small, arguments.repeats, packed, 256 * MIB)
            mode = "packed" if packed else "per tensor"
            each = total / arguments.small * 1e6
            results[f"{arguments.small} small tensors, {mode}"] = total
            print(f"{arguments.small} x 16 KiB, {mode}: {total:.3f} s, {each:.1f} us a tensor")
    finally:
        server.kill()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
