"""Tensors on the GPU into a running vLLM: vLLM's own trainer engine and streamer, same run.

    python benchmarks/module_vs_vllm.py --url http://127.0.0.1:8000 --checkpoint FOLDER \
        [--sizes 64,256,1024] [--num-buffers 2,3] [--names norm] [--trace PREFIX] [--rounds 2]

Needs vLLM importable on the trainer's side, for the rival only. Seconds are medians of connected
syncs, from ``/pause`` to the end of ``/resume`` for both: whoever uses the rival must call these,
as a completion during an update kills the server. streamer marks the server as incomplete and
resets its prefix cache as well. With ``--names`` only tensors whose names hold that text are sent:
few bytes leave what a sync takes whatever its size.
"""

from __future__ import annotations

import argparse
import functools
import json
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file

import streamer

MIB = 1 << 20


def rival(
    url: str, tensors: dict[str, torch.Tensor], repeats: int, packed: bool, buffer_size: int
) -> list[float]:
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: TID251
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: TID251
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: TID251
    from vllm.distributed.weight_transfer.nccl_engine import (  # noqa: TID251
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    class Source(WeightSource):  # type: ignore[misc]
        @functools.cached_property  # as vLLM 0.33 demands
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

        __iter__ = iter_full  # what vLLM 0.32 calls

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = HTTPVLLMWeightSyncClient(url)
    with set_current_vllm_config(VllmConfig()):
        engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                rank=0,
                master_address="127.0.0.1",
                master_port=port,
                world_size=2,
                packed=packed,
                packed_buffer_size_bytes=buffer_size,
            ),
            client=client,
            source=Source(),
        )
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        requests.post(f"{url}/pause?mode=keep", timeout=60).raise_for_status()
        engine.send_weights()
        requests.post(f"{url}/resume", timeout=60).raise_for_status()
        seconds.append(time.perf_counter() - started)
    client.shutdown_weight_transfer_engine()
    engine.shutdown()
    return seconds[1:]


def ours(
    url: str,
    tensors: dict[str, torch.Tensor],
    repeats: int,
    packed: bool,
    buffer_size: int,
    num_buffers: int,
    trace: str | None,
) -> list[streamer.Report]:
    record = streamer.Trace(enabled=False)
    with streamer.connect(
        url, packed=packed, buffer_size=buffer_size, num_buffers=num_buffers, trace=record
    ) as session:
        reports = [session.push(tensors) for _ in range(repeats + 1)]
        if trace is not None:
            record.enabled = True
            session.push(tensors)
            record.write(trace)
    return reports[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--rounds", type=int, default=2, help="each with a session of its own")
    parser.add_argument("--repeats", type=int, default=5, help="pushes of a session")
    parser.add_argument("--sizes", default="64,256,1024", help="MiB of a packed chunk, 0: each")
    parser.add_argument("--num-buffers", default="2,3", help="of streamer; vLLM's default is 2")
    parser.add_argument("--names", default="", help="a part of a name: send only such tensors")
    parser.add_argument("--trace", metavar="PREFIX")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(arguments.checkpoint).glob("*.safetensors")):
        tensors |= load_file(file, device="cuda:0")
    tensors = {name: tensor for name, tensor in tensors.items() if arguments.names in name}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    samples: dict[str, list[float]] = {}
    for size in map(int, arguments.sizes.split(",")):
        packed, chunk = bool(size), (size or 256) * MIB
        mode = f"packed {size} MiB" if packed else "per tensor"
        for turn in range(arguments.rounds):  # in turns: a server is not always as fast
            seconds = rival(arguments.url, tensors, arguments.repeats, packed, chunk)
            samples.setdefault(f"vLLM, {mode}", []).extend(seconds)
            for buffers in map(int, arguments.num_buffers.split(",")):
                trace = f"{arguments.trace}-{size}-{buffers}.json" if arguments.trace else None
                last = turn == arguments.rounds - 1
                reports = ours(
                    arguments.url,
                    tensors,
                    arguments.repeats,
                    packed,
                    chunk,
                    buffers,
                    trace if last else None,
                )
                for part in ("total", "update", "finish"):
                    name = f"streamer, {mode}, {buffers} buffers, {part}"
                    found = [getattr(report.seconds, part) for report in reports]
                    samples.setdefault(name, []).extend(found)
    print(f"{'seconds':42} median   least    most    GB/s")
    for what, found in samples.items():
        middle = statistics.median(found)
        spread = f"{middle:.4f}  {min(found):.4f}  {max(found):.4f}"
        print(f"{what:42} {spread}  {nbytes / 1e9 / middle:6.1f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(samples, indent=2))


if __name__ == "__main__":
    main()
