"""Tensors on the GPU into a running vLLM: vLLM's own trainer engine and streamer, same run.

    python benchmarks/module_vs_vllm.py --url http://127.0.0.1:8000 --checkpoint FOLDER \
        [--sizes 64,256,1024] [--num-buffers 2,3] [--names norm] [--trace FILE]

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
    record = streamer.Trace()
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", default="64,256,1024", help="MiB of a packed chunk")
    parser.add_argument("--num-buffers", default="2,3", help="of streamer; vLLM's default is 2")
    parser.add_argument("--names", default="", help="a part of a name: send only such tensors")
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(arguments.checkpoint).glob("*.safetensors")):
        tensors |= load_file(file, device="cuda:0")
    tensors = {name: tensor for name, tensor in tensors.items() if arguments.names in name}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    results: dict[str, float] = {}

    def tell(what: str, seconds: float, more: str = "") -> None:
        results[what] = seconds
        rate = nbytes / 1e9 / seconds
        print(f"{what:34} {seconds:.4f} s  {rate:6.1f} GB/s  {more}", flush=True)

    sizes = [int(size) for size in arguments.sizes.split(",")]
    for size in [*sizes, None]:
        packed, chunk = size is not None, (size or 256) * MIB
        mode = f"packed {size} MiB" if packed else "per tensor"
        seconds = rival(arguments.url, tensors, arguments.repeats, packed, chunk)
        tell(f"vLLM, {mode}", statistics.median(seconds))
        for buffers in map(int, arguments.num_buffers.split(",")):
            trace = arguments.trace if size == 256 else None
            reports = ours(arguments.url, tensors, arguments.repeats, packed, chunk, buffers, trace)
            update = statistics.median(report.seconds.update for report in reports)
            total = statistics.median(report.seconds.total for report in reports)
            finish = statistics.median(report.seconds.finish for report in reports)
            tell(
                f"streamer, {mode}, {buffers} buffers",
                total,
                f"update {update:.4f} s, finish {finish:.4f} s",
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
