"""Reading a checkpoint from the page cache: our readers against others, in the same run.

    python benchmarks/readers.py [CHECKPOINT] [--size 1024] [--repeats 5]
    python benchmarks/readers.py /models/Qwen3-8B --device cuda:0

Without CHECKPOINT one of random bytes is made. The rivals are ``safetensors.torch.load_file``, and
fastsafetensors and Run:ai Model Streamer where they can be imported (``pip install fastsafetensors
runai-model-streamer``, in an environment of your own). Each reads every tensor once:

- to the CPU: ours and Run:ai into buffers that are used again; load_file as it comes, which maps
  the files and reads nothing, and with each tensor copied into buffers like ours; fastsafetensors
  into memory of its own.
- to a GPU (``--device``): each ends with every tensor's bytes on the device.

Prints medians and minima of GB/s. One run of each in turn, the first round not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import torch
from safetensors.torch import load_file

import streamer
from streamer.bench.checkpoint import write_checkpoint
from streamer.bench.machine import describe_machine, describe_versions
from streamer.bench.read import Reading
from streamer.cli._output import draw_table

MIB = 1 << 20


def mapped(paths: list[Path], device: torch.device) -> None:
    for path in paths:
        load_file(path, device=str(device))


def copied(paths: list[Path], memory: torch.Tensor) -> None:
    at = 0
    for path in paths:
        for tensor in load_file(path).values():
            data = tensor.view(-1).view(torch.uint8)
            at = at if at + data.numel() <= memory.numel() else 0
            memory[at : at + data.numel()].copy_(data)
            at += data.numel()


def fast(paths: list[Path], device: torch.device) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), str(device), nogds=True, disable_cache=False)
    try:
        loader.add_filenames({0: [str(path) for path in paths]})
        buffers = loader.copy_files_to_device()
        try:
            for name in buffers.key_to_rank_lidx:
                buffers.get_tensor(name)
        finally:
            buffers.close()
    finally:
        loader.close()


def run_ai(paths: list[Path], device: torch.device) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as reader:
        # Views of a buffer that it uses again, as ours are; by default it gives memory away.
        kept = {"owned": False} if "owned" in signature(reader.stream_files).parameters else {}
        reader.stream_files([str(path) for path in paths], device=str(device), **kept)
        for _ in reader.get_tensors():
            pass


def importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--size", type=int, default=1024, help="MiB, if one is made")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 16])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.checkpoint
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_checkpoint(Path(folder), arguments.size * MIB)
        compare(Path(folder), arguments)


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    device: torch.device = arguments.device
    paths = sorted(folder.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(streamer.open_source(folder)))
        nbytes = sum(spec.nbytes for spec in source.specs())
        runs: dict[str, Callable[[], None]] = {}
        for threads in arguments.threads:
            reading = Reading(source, device, threads, sample=nbytes)
            stack.callback(reading.close)
            runs[f"streamer, {threads} threads"] = reading.run
        runs["load_file"] = lambda: mapped(paths, device)
        if device.type == "cpu":
            # As much as our staging buffers have, or a small one would stay in the cache.
            largest = max(spec.nbytes for spec in source.specs())
            memory = torch.zeros(max(3 * 64 * MIB, largest), dtype=torch.uint8)
            runs["load_file, copied"] = lambda: copied(paths, memory)
        if importable("fastsafetensors"):
            runs["fastsafetensors"] = lambda: fast(paths, device)
        if importable("runai_model_streamer"):
            runs["Run:ai Model Streamer"] = lambda: run_ai(paths, device)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(arguments.repeats + 1):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds[name].append(time.perf_counter() - started)
    rows = []
    for name, values in seconds.items():
        median, least = statistics.median(values[1:]), min(values[1:])
        rates = (f"{nbytes / 1e9 / each:.2f}" for each in (median, least))
        rows.append((name, f"{median:.4f}", *rates))
    draw_table((f"page cache to {device}", ">median s", ">GB/s", ">best GB/s"), rows)
    machine, versions = describe_machine(), describe_versions()
    gpus = machine["gpus"] or "no GPU"
    print(f"{nbytes / 1e9:.2f} GB, {machine['cores']} cores, {gpus}, load {machine['load']}")
    print(versions)
    for module in ("fastsafetensors", "runai_model_streamer"):
        if not importable(module):
            print(f"not measured: {module} cannot be imported here")
    if arguments.json is not None:
        found = {"machine": machine, "versions": versions, "bytes": nbytes, "seconds": seconds}
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
