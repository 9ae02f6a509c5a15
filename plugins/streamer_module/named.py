"""What sources of named tensors in this process's memory have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from streamer.exceptions import SourceError, UsageError
from streamer.source import TensorSpec, WeightSource, check_sendable
from streamer_module.structure import is_a, is_of_adapter, is_sharded_tensor

TIED = ("all", "first")
_PLAIN = (torch.Tensor, nn.Parameter)


class Named(NamedTuple):
    """A tensor, the name that it is sent under, and the one that its owner knows it by."""

    name: str
    path: str
    tensor: torch.Tensor


class NamedTensors(WeightSource):
    """Tensors that are looked up anew at every sync: what is sent is their values by then.

    Nothing is copied. ``tied`` says what becomes of a tensor that has several names: ``all`` sends
    it under each of them, ``first`` under the first. Tensors are the same only if they are the same
    view of the same memory, whatever their values.
    """

    lasting = True

    def __init__(self, tied: str) -> None:
        if tied not in TIED:
            raise UsageError(f"tied must be one of {', '.join(TIED)}, not {tied!r}")
        self._tied = tied
        self.tensors()

    @abstractmethod
    def look_up(self) -> Iterable[Named]:
        """Every tensor as it is now, in the order to send them."""

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Differs from call to call only if tensors were exchanged."""
        return [
            TensorSpec(found.name, found.tensor.dtype, tuple(found.tensor.shape))
            for found in self.tensors()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for found in self._chosen(self.look_up()):
            yield found.name, found.tensor.detach()

    def tensors(self) -> list[Named]:
        """What to send. Raises `SourceError` that names the first tensor that cannot be sent."""
        named = list(self.look_up())
        if not named:
            raise SourceError("it has no parameters or persistent buffers: nothing to send")
        check_names((found.name, found.path) for found in named)
        for found in named:
            check_tensor(found.path, found.tensor)
        return list(self._chosen(named))

    def _chosen(self, named: Iterable[Named]) -> Iterable[Named]:
        if self._tied == "all":
            return named
        first: dict[object, Named] = {}
        for found in named:
            first.setdefault(same_memory(found.tensor), found)
        return first.values()


def same_memory(tensor: torch.Tensor) -> object:
    """Equal for live tensors that are one view of one memory. An empty tensor is only itself."""
    if not tensor.numel():
        return id(tensor)
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), view


def check_names(names: Iterable[tuple[str, str]]) -> None:
    """Raise `SourceError` for an adapter's names, and for two ``path`` that get one ``name``.

    ``names`` are pairs of a name to send and the path that it was made of.
    """
    taken: dict[str, str] = {}
    for name, path in names:
        if is_of_adapter(name):
            raise SourceError(
                f"{path} belongs to an adapter, which no server takes for weights: push the PEFT "
                "model itself, which is merged on the way, or merge it first"
            )
        if taken.setdefault(name, path) != path:
            raise SourceError(
                f"{taken[name]} and {path} would both be called {name}, without what wrappers add "
                "to names: rename one, or open it with wrappers='keep'"
            )


def check_tensor(name: str, tensor: object) -> None:
    """Raise `SourceError` unless ``tensor`` is plain memory that holds the values themselves."""
    if not isinstance(tensor, torch.Tensor):
        # As in a checkpoint of a trainer, which holds a state dict among other things.
        inside = isinstance(tensor, dict) and any(map(torch.is_tensor, tensor.values()))
        remedy = f": push what is in it, as checkpoint[{name!r}]" if inside else ": leave it out"
        raise SourceError(f"{name} is a {_kind(tensor)}, not a tensor{remedy}")
    if hasattr(tensor, "ds_id") and tensor.shape != getattr(tensor, "ds_shape", None):
        raise SourceError(
            f"{name} is partitioned by DeepSpeed ZeRO-3: use ZeRO-2 or FSDP, or gather it, with "
            "deepspeed.zero.GatheredParameters in a streamer.integrations.lockstep.Lockstep"
        )
    if type(tensor) in _PLAIN:
        check_sendable(name, tensor)
        return
    kind = _kind(tensor)
    if is_sharded_tensor(tensor):
        raise SourceError(
            f"{name} is sharded over ranks ({kind}): the source fsdp gathers it (scheme='fsdp')"
        )
    if is_a(tensor, "UninitializedTensorMixin", "torch.nn"):
        raise SourceError(f"{name} has no shape yet: call the module once, then push it")
    raise SourceError(
        f"{name} is a {kind} of {tensor.dtype}, whose memory is not its values: dequantize it, "
        "or push a state dict of plain tensors under the checkpoint's names"
    )


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
