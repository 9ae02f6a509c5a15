"""FSDP1: what its flat parameters hold, and one unit of them whole at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from streamer.exceptions import SourceError

NAME = "_flat_param"
"""What FSDP1 calls a flat parameter, which is no weight."""


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter that is a part of a unit's flat one."""

    unit: nn.Module
    dtype: torch.dtype
    shape: tuple[int, ...]
    same: object
    """Equal for two names of one parameter."""


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` is FSDP1's wrapper."""
    return isinstance(module, FullyShardedDataParallel)


def parameters(module: nn.Module) -> dict[nn.Module, dict[str, FlatParameter]]:
    """By module and key, what the flat parameters below ``module`` hold. Moves no data.

    Torch tells the shapes of sharded parameters only by gathering them, or in the attributes that
    the docstring of its flat parameter lists, which are read here.
    """
    found: dict[nn.Module, dict[str, FlatParameter]] = {}
    for unit in module.modules():
        if not isinstance(unit, FullyShardedDataParallel) or unit._flat_param is None:
            continue
        flat = unit._flat_param
        if flat.is_meta:
            raise SourceError(
                f"{flat._fqns[0]} is on the meta device, without values: load the model's weights "
                "first"
            )
        if any(extension is not None for extension in flat._param_extensions):
            raise SourceError(
                f"{flat._fqns[0]} is a DTensor inside FSDP1, which hides its whole shape: shard "
                "the model with fully_shard"
            )
        # While low precision is in place, the shard still tells what is gathered.
        dtype = getattr(flat, "_local_shard", flat).dtype
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            same = (info.module, info.param_name)
            parameter = FlatParameter(unit, dtype, tuple(shape), same)
            found.setdefault(info.module, {})[info.param_name] = parameter
        for shared in flat._shared_param_infos:
            first = found[shared.prim_module][shared.prim_param_name]
            found.setdefault(shared.module, {})[shared.param_name] = first
    return found


@contextlib.contextmanager
def gathered(unit: nn.Module) -> Iterator[None]:
    """A block in which the parameters of ``unit``, not of those inside it, are whole in place.

    A collective, whose memory is that of the whole unit. The outermost unit must be the first:
    torch takes the first one that it sees for the root of all.
    """
    with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
        yield
