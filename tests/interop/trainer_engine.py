"""vLLM's own trainer engine sends a checkpoint through our client: trainer_engine.py URL CHECKPOINT

All of it is vLLM's own, but for the NCCL communicator, which needs GPUs: Gloo takes its place.
Prints the parameters sent. Run where vLLM is installed.
"""
# ruff: noqa: TID251

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

import streamer
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline


class Checkpoint(WeightSource):
    def __init__(self, folder: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(Path(folder).glob("*.safetensors")):
            self._tensors |= load_file(shard)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


class OverGloo(nccl_engine.NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous(), 60)

    def _post_send_sync(self) -> None:
        """No stream to wait for."""


def main(url: str, folder: str) -> None:
    lifeline = Lifeline.host("127.0.0.1")

    def open_endpoint(init_info: Any) -> GlooTransport:
        group = GlooTransport(lifeline, 0, init_info.world_size)
        group.connect(60)
        return group

    nccl_engine.open_trainer_endpoint = open_endpoint
    client = streamer.WeightSyncClient(url, timeout=60)
    source = Checkpoint(folder)
    engine = OverGloo.trainer_init(
        nccl_engine.NCCLTrainerInitInfo(
            master_address="127.0.0.1",
            master_port=lifeline.port,
            world_size=1 + client.get_world_size(),
            packed=False,
            rank=0,
        ),
        client=client,
        source=source,
    )
    for step in range(2):
        client.pause_generation()
        engine.send_weights()
        client.update_weight_version(f"trainer-{step}")
        client.reset_prefix_cache(reset_running_requests=True)
        client.resume_generation()
    client.shutdown_weight_transfer_engine()
    engine.model_update_group.close()
    lifeline.close()
    print(len(source.metadata()))


if __name__ == "__main__":
    main(*sys.argv[1:])
