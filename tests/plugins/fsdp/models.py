"""Models on every rank alike: unsharded, and sharded in many ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import streamer


class Block(nn.Module):
    """Attention's projections and a feed-forward part, of sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """A small decoder without a mask."""

    def __init__(self, width: int = 13, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 29, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make(**options: Any) -> Transformer:
    """The same model on every rank."""
    torch.manual_seed(0)
    return Transformer(**options)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2, layer by layer and the rest."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def state_dict(ranks: int) -> Any:
    model = make()
    return shard(make()).state_dict(), model.state_dict()


def compiled(ranks: int) -> Any:
    """Wrappers inside of sharded layers, and around them (case 31)."""
    model = make()
    for index, layer in enumerate(model.layers):
        layer.up = checkpoint_wrapper(layer.up)
        model.layers[index] = fully_shard(checkpoint_wrapper(layer))
    return torch.compile(fully_shard(model)), make().state_dict()


def one_unit(ranks: int) -> Any:
    return fully_shard(make(tied=True)), make(tied=True).state_dict()


def tied_first(ranks: int) -> Any:
    """Width 2 over more ranks: some have nothing of the tied weight, and still agree."""
    model = make(width=2, tied=True)
    expected = model.state_dict()
    model.embed = model.lm_head = nn.Linear(2, 2, bias=False)
    expected |= {"embed.weight": model.embed.weight.detach().clone()}
    del expected["lm_head.weight"]
    sharded = fully_shard(model)
    return streamer.open_source(sharded, scheme="fsdp", tied="first"), expected


def tied_state(ranks: int) -> Any:
    _, expected = tied_first(ranks)
    model = make(width=2, tied=True)
    model.embed = model.lm_head = nn.Linear(2, 2, bias=False)
    model.embed.weight.data = expected["embed.weight"].clone()
    source = fully_shard(model).state_dict()
    assert "lm_head.weight" in source
    return streamer.open_source(source, scheme="fsdp", tied="first"), expected


def mixed(ranks: int) -> Any:
    """Frozen parameters, several dtypes, and layers that are not sharded at all."""

    def build() -> Transformer:
        model = make()
        model.layers[0].bfloat16()
        model.layers[0].norm.requires_grad_(False)
        model.layers[1].qkv.half().requires_grad_(False)
        return model

    model = build()
    fully_shard(model.layers[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    fully_shard(model.layers[1].qkv)
    fully_shard(model.embed)
    return model, build().state_dict()


def offloaded(ranks: int) -> Any:
    policy = CPUOffloadPolicy(pin_memory=False)
    return shard(make(), offload_policy=policy), make().state_dict()


def hybrid(ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return shard(make(), mesh=mesh), make().state_dict()


PARALLEL = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def tensor_parallel(ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (ranks,))
    model = make()
    for layer in model.layers:
        parallelize_module(layer, mesh, PARALLEL)
    return model, make().state_dict()


def two_dimensions(ranks: int) -> Any:
    """Tensor parallel in pairs, and FSDP over them."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tensor"))
    model = make(width=12)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], PARALLEL)
    return shard(model, mesh=mesh["fsdp"]), make(width=12).state_dict()


def placements(ranks: int) -> Any:
    """Every placement and many dtypes, as entries of a state dict."""
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2))
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor, mesh: Any, *how: Any) -> None:
        expected[name] = tensor
        if any(isinstance(item, Partial) for item in how):
            sizes = [mesh.size(i) for i, item in enumerate(how) if isinstance(item, Partial)]
            parts = tensor / math.prod(sizes)  # a power of two: the sum is exact
            state[name] = DTensor.from_local(parts, mesh, how)
        elif tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point:
            # Cut by hand: torch scatters only what Gloo can.
            (dim,) = (item.dim for item in how)
            chunks = tensor.tensor_split(
                [
                    min(-(-tensor.shape[dim] // ranks) * i, tensor.shape[dim])
                    for i in range(1, ranks)
                ],
                dim,
            )
            local = chunks[dist.get_rank()].contiguous()
            state[name] = DTensor.from_local(
                local, mesh, how, shape=tensor.shape, stride=tensor.stride()
            )
        else:
            state[name] = distribute_tensor(tensor, mesh, how)

    floats = torch.randn(5, 7, 3, generator=generator)
    add("rows", floats, line, Shard(0))
    add("columns", floats.bfloat16(), line, Shard(1))
    add("last", floats.double(), line, Shard(2))
    add("everywhere", floats, line, Replicate())
    add("sum", floats, line, Partial())
    add("grid", floats, square, Shard(0), Shard(1))
    add("twice", floats, square, Shard(0), Shard(0))
    add("turned", floats.half(), square, Replicate(), Shard(2))
    add("sums", floats, square, Replicate(), Partial())
    add("empty", floats[:0].clone(), line, Shard(0))
    add("one", floats[:1].clone(), line, Shard(0))
    whole = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=generator)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        add(str(dtype), whole.view(dtype), line, Shard(0))
        add(f"{dtype} columns", whole.view(dtype), line, Shard(1))
    add("int16", whole.view(torch.int16).clone(), line, Shard(0))
    add("complex64", whole.view(torch.complex64).clone(), line, Shard(0))
    add("int8", whole.view(torch.int8), line, Shard(0))
    add("bool", whole > 127, line, Shard(0))
    state["plain"] = expected["plain"] = floats[0]
    return state, expected


def fsdp1(ranks: int, **options: Any) -> Any:
    def build() -> Transformer:
        model = make(tied=True)
        model.layers[0].bfloat16()
        model.layers[1].up.requires_grad_(False)
        return model

    model = build()
    for index, layer in enumerate(model.layers):
        layer.down = FullyShardedDataParallel(
            layer.down, device_id=torch.device("cpu"), use_orig_params=True
        )
        model.layers[index] = FullyShardedDataParallel(
            checkpoint_wrapper(layer), device_id=torch.device("cpu"), use_orig_params=True
        )
    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return whole, build().state_dict()


def fsdp1_flat(ranks: int) -> Any:
    """Without the original parameters: only uniform units, and one layer left alone."""

    def build() -> Transformer:
        return make(tied=True)

    model = build()
    model.layers[1] = FullyShardedDataParallel(
        model.layers[1], device_id=torch.device("cpu"), ignored_modules=[model.layers[1].norm]
    )
    whole = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), ignored_modules=[model.layers[0]]
    )
    return whole, build().state_dict()


def fsdp1_tied_first(ranks: int) -> Any:
    source, expected = fsdp1_flat(ranks)
    del expected["lm_head.weight"]
    return streamer.open_source(source, scheme="fsdp", tied="first"), expected


def transformed(ranks: int) -> Any:
    """What is left out is gathered as well, at the end of the source too."""
    source = streamer.exclude(shard(make()), "embed.weight", "layers.1.*", "norm.*", "lm_head.*")
    source = streamer.rename(streamer.cast(source, "bfloat16"), r"^layers", "blocks")
    expected = {
        name.replace("layers", "blocks"): tensor.bfloat16()
        if tensor.is_floating_point()
        else tensor
        for name, tensor in make().state_dict().items()
        if name.startswith("layers.0")
    }
    return source, expected


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VllmSource:
    """As vLLM 0.32 has it: iterating is a collective, which every rank comes to."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def metadata(self) -> list[ParamMeta]:
        named = self.module.named_parameters()
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]

    def held_names(self) -> set[str] | None:
        return None if dist.get_rank() == 0 else set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.module.named_parameters():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vllm(ranks: int) -> Any:
    return VllmSource(shard(make())), dict(make().named_parameters())


KINDS: dict[str, Callable[[int], Any]] = {
    function.__name__: function
    for function in (
        state_dict,
        compiled,
        one_unit,
        tied_first,
        tied_state,
        mixed,
        offloaded,
        hybrid,
        tensor_parallel,
        two_dimensions,
        placements,
        fsdp1,
        fsdp1_flat,
        fsdp1_tied_first,
        transformed,
        vllm,
    )
}
