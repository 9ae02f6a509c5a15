"""Disk to a receiver that discards, over Gloo on CPUs, against an ideal pipeline in the same run.

    python benchmarks/gloo_pipeline.py [--size 1024] [--repeats 7]

The ideal: one thread that ``preadv``s the files into buffers of 64 MiB, one that broadcasts them,
and a receiver in another process that reuses its buffer; torch's own process group, no plan, no
HTTP, no checks. Ours: ``Session.push``, connected and warm, into ``streamer serve --discard``, from
opening the checkpoint to the server's last answer. Both send the same files, in turns. Prints
medians and minima; a busy machine shows in the load and in how far these are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import streamer
from streamer.bench.checkpoint import write_checkpoint
from streamer.bench.machine import describe_machine, describe_versions
from streamer.cli._output import draw_table
from streamer.cli._reference import reference_server
from streamer.defaults import DEFAULT_THREADS
from streamer.payloads import as_memoryview

MIB = 1 << 20
PIECE = 64 * MIB
BUFFERS = 3


def sizes_of(paths: list[Path]) -> list[int]:
    """The pieces in which the ideal pipeline sends the files."""
    nbytes = sum(path.stat().st_size for path in paths)
    return [min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)]


def join(port: int, rank: int) -> None:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)


def receive(port: int, sizes: list[int], rounds: int) -> None:
    """The other process: into one buffer, again and again."""
    join(port, 1)
    buffer = torch.zeros(PIECE, dtype=torch.uint8)
    for _ in range(rounds):
        dist.barrier()
        for size in sizes:
            dist.broadcast(buffer[:size], 0)
        dist.barrier()
    dist.destroy_process_group()


class Ideal:
    """The pipeline that nothing on top of Gloo can be much faster than."""

    def __init__(self, paths: list[Path]) -> None:
        self.sizes = sizes_of(paths)
        self.files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in paths]
        self.buffers = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(BUFFERS)]

    def read(self, free: queue.SimpleQueue[int], full: queue.SimpleQueue[int]) -> None:
        """Fill buffer after buffer with the bytes of all files."""
        views = [as_memoryview(buffer) for buffer in self.buffers]
        number, done, filled, at = free.get(), 0, 0, 0
        for file, size in self.files:
            at = 0
            while at < size:
                wanted = self.sizes[filled] - done
                count = os.preadv(file, [views[number][done : done + min(wanted, size - at)]], at)
                at, done = at + count, done + count
                if done == self.sizes[filled]:
                    full.put(number)
                    filled, done = filled + 1, 0
                    if filled < len(self.sizes):
                        number = free.get()

    def run(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        full: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(BUFFERS):
            free.put(number)
        reader = threading.Thread(target=self.read, args=(free, full))
        reader.start()
        for size in self.sizes:
            number = full.get()
            dist.broadcast(self.buffers[number][:size], 0)
            free.put(number)
        reader.join()
        dist.barrier()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="MiB of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--buffer-size", type=int, nargs="*", default=[64, 256], help="MiB, of ours"
    )
    parser.add_argument(
        "--threads", type=int, nargs="*", default=[DEFAULT_THREADS], help="readers, of ours"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(*json.loads(arguments.receive))
        return
    rounds = arguments.repeats + 1
    with (
        tempfile.TemporaryDirectory() as folder,
        reference_server("--workers", "1", "--device", "cpu", "--discard") as server,
    ):
        write_checkpoint(Path(folder), arguments.size * MIB)
        paths = sorted(Path(folder).glob("*.safetensors"))
        ideal = Ideal(paths)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        task = json.dumps([port, ideal.sizes, rounds])
        with subprocess.Popen([sys.executable, __file__, "--receive", task]) as peer:
            try:
                join(port, 0)
                url = server.url()
                runs: dict[str, Callable[[], float]] = {"ideal pipeline": ideal.run}
                for size in arguments.buffer_size:
                    for threads in arguments.threads:
                        runs[f"streamer, {size} MiB, {threads} threads"] = partial(
                            push, folder, url, buffer_size=size * MIB, threads=threads
                        )
                seconds: dict[str, list[float]] = {name: [] for name in runs}
                for _ in range(rounds):
                    for name, run in runs.items():
                        seconds[name].append(run())
                peer.wait(60)
                dist.destroy_process_group()
            finally:
                peer.kill()
    nbytes = sum(ideal.sizes)
    report(seconds, nbytes, arguments.json)


def push(folder: str, url: str, *, buffer_size: int, threads: int) -> float:
    """Seconds of the second push of a session: the first one makes the buffers."""
    with streamer.connect(url, buffer_size=buffer_size, threads=threads) as session:
        session.push(folder)
        return session.push(folder).seconds.total


def report(seconds: dict[str, list[float]], nbytes: int, path: Path | None) -> None:
    """Medians and minima, without the first run."""
    kept = {name: values[1:] for name, values in seconds.items()}
    best = {name: (statistics.median(values), min(values)) for name, values in kept.items()}
    median, least = best["ideal pipeline"]
    draw_table(
        ("", ">median s", ">GB/s", ">of ideal", ">least s", ">of ideal"),
        [
            (
                name,
                f"{mid:.3f}",
                f"{nbytes / 1e9 / mid:.2f}",
                f"{median / mid:.0%}",
                f"{low:.3f}",
                f"{least / low:.0%}",
            )
            for name, (mid, low) in best.items()
        ],
    )
    machine = describe_machine()
    versions = describe_versions()
    print(f"{nbytes / 1e9:.2f} GB, {machine['cores']} cores, load {machine['load']}, {versions}")
    if path is not None:
        found = {"machine": machine, "versions": versions, "bytes": nbytes, "seconds": kept}
        path.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
