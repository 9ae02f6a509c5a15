"""Whether what NCCL gathers is right, on two GPUs.

    torchrun --nproc-per-node 2 tests/gpu/check_fsdp.py

Every rank iterates the source, as in a push; each value is compared with the unsharded model's.
What the CPU tests cannot see: shards offloaded to the host, dtypes that NCCL lacks, FSDP1's
streams, and that what is yielded is ready on the current stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import streamer_fsdp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from streamer.source import checked


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1025, 2049), nn.ReLU(), nn.Linear(2049, 513)).cuda()


def offloaded() -> tuple[object, dict[str, torch.Tensor]]:
    model = make()
    for layer in (model[0], model[2], model):
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return model, make().state_dict()


def sharded() -> tuple[object, dict[str, torch.Tensor]]:
    model = make()
    fully_shard(model[2])
    return fully_shard(model), make().state_dict()


def flat() -> tuple[object, dict[str, torch.Tensor]]:
    model = make()
    model[2] = FullyShardedDataParallel(model[2], use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True), make().state_dict()


def dtypes() -> tuple[object, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cuda", (2,))
    generator = torch.Generator("cuda").manual_seed(0)
    data = torch.randint(0, 256, (6, 1024), dtype=torch.uint8, device="cuda", generator=generator)
    state: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.int16,
        torch.complex64,
        torch.bfloat16,
        torch.bool,
    ):
        whole = data.bool() if dtype == torch.bool else data.view(dtype).clone()
        local = whole.chunk(2)[dist.get_rank()].contiguous()
        expected[str(dtype)] = whole
        state[str(dtype)] = DTensor.from_local(local, mesh, [Shard(0)])
    return state, expected


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
    )


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cases: tuple[Callable[[], tuple[object, dict[str, torch.Tensor]]], ...]
    cases = (sharded, offloaded, flat, dtypes)
    for case in cases:
        source, expected = case()
        assert streamer_fsdp.accepts(source)
        opened = streamer_fsdp.open_fsdp(source)
        specs = opened.specs()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for spec, tensor in zip(specs, checked(opened, specs), strict=True):
                assert isinstance(tensor, torch.Tensor)
                assert tensor.device == device
                assert same(tensor, expected[spec.name]), (case.__name__, spec.name)
        assert len(specs) == len(expected)
        if dist.get_rank() == 0:
            print(case.__name__, len(specs), "tensors right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
