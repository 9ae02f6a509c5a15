"""What is sharded, and how one whole tensor is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from streamer_module.named import check_tensor, same_memory
from streamer_module.source import named_entries
from streamer_module.structure import Place, own_tensors, walk_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from streamer.exceptions import SourceError
from streamer_fsdp import flat

_NATIVE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
"""What Gloo and NCCL both gather. Others (fp8, int16, complex) travel as bytes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor to send. ``place`` is where it is, or itself; see `Found.whole`."""

    name: str
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    same: object
    """Equal for two names of one tensor, on every rank alike."""
    place: Place | torch.Tensor

    def whole(self) -> torch.Tensor:
        """Its values, gathered from the ranks. For what FSDP1 holds, inside its unit's block."""
        place = self.place
        return gather(place if isinstance(place, torch.Tensor) else place.tensor)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are gathered at once, with ``module``, a unit of FSDP1; without, one by one."""

    module: nn.Module | None
    tensors: list[Found]


def find(source: nn.Module | Mapping[str, torch.Tensor], wrappers: str) -> list[Unit]:
    """Everything that is to be sent, as it is now, in the order to send it. Moves no data.

    FSDP2 may have left modules gathered after a forward pass: they are resharded.
    """
    if isinstance(source, nn.Module):
        return _of_module(source, wrappers)
    found = [
        _plain(named.name, named.path, named.tensor, named.tensor)
        for named in named_entries(source, wrappers)
    ]
    return [Unit(None, found)]


def _of_module(module: nn.Module, wrappers: str) -> list[Unit]:
    """Every FSDP1 unit has its own place, outer ones first: see `flat.gathered`."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    flats = flat.parameters(module)
    units: list[Unit] = []
    of: dict[nn.Module, Unit] = {}
    for name, path, part in walk_modules(module):
        prefix = name if wrappers == "strip" else path
        if flat.is_unit(part) and part not in of:
            of[part] = Unit(part, [])
            units.append(of[part])
        held = flats.get(part, {})
        for key, parameter in held.items():
            place = Place(name + key, path + key, part, key)
            of[parameter.unit].tensors.append(
                Found(
                    prefix + key,
                    path + key,
                    parameter.dtype,
                    parameter.shape,
                    parameter.same,
                    place,
                )
            )
        for key, tensor in own_tensors(part):
            if key not in held and key != flat.NAME:
                if not units or units[-1].module is not None:
                    units.append(Unit(None, []))
                place = Place(name + key, path + key, part, key)
                units[-1].tensors.append(_plain(prefix + key, path + key, tensor, place))
    return units


def _plain(name: str, path: str, tensor: torch.Tensor, place: Place | torch.Tensor) -> Found:
    """A tensor that is whole on this rank, or a DTensor."""
    same: object
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        check_tensor(path, local)
        if tensor.device_mesh.get_coordinate() is None:
            raise SourceError(
                f"{path} has no part on this rank, which is not in its mesh: open the source with "
                "the group= of those ranks that are, and push there"
            )
        # Of the storage, which is told apart also where this rank has none of the values.
        view = (local.storage_offset(), tuple(local.shape), local.stride(), local.is_conj())
        same = (id(local.untyped_storage()), view, tensor.dtype, tensor.shape, tensor.placements)
    else:
        check_tensor(path, tensor)
        same = same_memory(tensor)
    return Found(name, path, tensor.dtype, tuple(tensor.shape), same, place)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` whole: itself, or a collective over the mesh of a DTensor.

    The collective is ordered into the current stream, and what is offloaded to the host is gathered
    on the device of its mesh: at most this rank's shard is copied for that.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, placements, dtype = tensor.device_mesh, tensor.placements, tensor.dtype
    partial = any(isinstance(placement, Partial) for placement in placements)
    with torch.no_grad():
        there = tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)
        assert isinstance(there, DTensor)
        if dtype in _NATIVE or partial:
            whole: torch.Tensor = there.full_tensor()
            return whole
        raw = there._local_tensor.resolve_conj().resolve_neg().contiguous().unsqueeze(-1)
        shape = torch.Size((*tensor.shape, dtype.itemsize))
        stride = torch.empty(shape, device="meta").stride()
        in_bytes = DTensor.from_local(
            raw.view(torch.uint8), mesh, placements, shape=shape, stride=stride
        )
        whole = in_bytes.full_tensor().contiguous()
        return whole.view(dtype).squeeze(-1)
