"""Modules, state dicts and factories of pairs: what of them is sent, and under which names."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from streamer.exceptions import SourceError, UsageError
from streamer.source import TensorSpec, WeightSource
from streamer_module.named import Named, NamedTensors, check_names, check_tensor
from streamer_module.structure import (
    is_a,
    is_adapted,
    is_sharded,
    is_sharded_tensor,
    walk,
    without_wrappers,
)
from streamer_module.vllm_source import VllmSource, is_vllm_source

WRAPPERS = ("strip", "keep")
_DICTS = (dict, OrderedDict)
_EXTRA_STATE = "_extra_state"

Pairs = Iterable[tuple[str, torch.Tensor]]


def accepts(source: object) -> bool:
    """Whether `open_module` is for ``source``. Sharded and PEFT models are for other sources."""
    if isinstance(source, nn.Module):
        return not is_sharded(source) and not is_adapted(source)
    if isinstance(source, Mapping):
        return not any(map(is_sharded_tensor, source.values()))
    if isinstance(source, (str, bytes, type, torch.Tensor, WeightSource)):
        return False
    return is_vllm_source(source) or isinstance(source, Iterable) or callable(source)


def open_module(
    source: object, *, tied: str | None = None, wrappers: str | None = None
) -> WeightSource:
    """Open a module, a state dict, a factory of pairs, or a source written for vLLM.

    ``tied``, of a module or a ``dict``, is ``all`` (the default) or ``first``: see `NamedTensors`.
    ``wrappers`` is ``strip`` (the default) or ``keep``: what becomes of the parts that DDP,
    torch.compile and activation checkpointing put into names. Raises `SourceError` for weights
    that cannot be sent, `UsageError` for an option that does not apply.
    """

    def given(*known: str) -> dict[str, str]:
        options = {"tied": tied, "wrappers": wrappers}
        chosen = {name: value for name, value in options.items() if value is not None}
        for name in chosen.keys() - set(known):
            raise UsageError(f"a {type(source).__name__} takes no option {name}")
        return chosen

    if wrappers not in (None, *WRAPPERS):
        raise UsageError(f"wrappers must be one of {', '.join(WRAPPERS)}, not {wrappers!r}")
    if isinstance(source, nn.Module):
        return ModuleSource(source, **given("tied", "wrappers"))
    if isinstance(source, Mapping):
        tied_too = ("tied",) if type(source) in _DICTS else ()
        return StateDictSource(source, **given(*tied_too, "wrappers"))
    if is_vllm_source(source):
        return VllmSource(source, **given())
    if callable(source):
        return PairsSource(source, **given("wrappers"))
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        return PairsSource(source, **given("wrappers"))
    raise SourceError(
        f"the source module takes no {type(source).__name__}: from Python, push a module, a state "
        "dict, or a function that returns (name, tensor) pairs"
    )


class ModuleSource(NamedTensors):
    """The parameters and persistent buffers of a module, in the order of its ``state_dict()``.

    A layer's tensors come together. The module is walked anew at every sync; it must not be changed
    while it is pushed.
    """

    def __init__(self, module: nn.Module, tied: str = "all", wrappers: str = "strip") -> None:
        if is_adapted(module):
            raise SourceError(
                "it is a PEFT model, whose adapters are no weights of the base model: the source "
                "peft merges them on the way (scheme='peft')"
            )
        if is_sharded(module):
            raise SourceError(
                "it is sharded over ranks: the source fsdp gathers it (scheme='fsdp')"
            )
        if any(is_a(part, "ScriptModule", "torch.jit") for part in module.modules()):
            raise SourceError(
                "it is made by TorchScript, which hides its tensors: push its state_dict()"
            )
        for path, part in module.named_modules():
            if any(isinstance(held, torch.ScriptObject) for held in vars(part).values()):
                raise SourceError(
                    f"{path or 'it'} is a {type(part).__module__}.{type(part).__qualname__}, which "
                    "packs its weights: push the module that it was quantized from"
                )
        self._module = module
        self._wrappers = wrappers
        super().__init__(tied)

    def look_up(self) -> Iterator[Named]:
        """See `NamedTensors.look_up`."""
        for place in walk(self._module):
            name = place.name if self._wrappers == "strip" else place.path
            yield Named(name, place.path, place.tensor)


class StateDictSource(NamedTensors):
    """The tensors of a mapping, in its order. It is kept, and read again at every sync.

    ``_extra_state`` entries, which are no weights, are left out. For what ``strip`` does to names
    see `without_wrappers`. Only a ``dict`` is trusted to hold its tensors, so that each has memory
    of its own: another mapping may make them one by one, in the same place.
    """

    def __init__(
        self, mapping: Mapping[str, torch.Tensor], tied: str = "all", wrappers: str = "strip"
    ) -> None:
        self._mapping = mapping
        self.lasting = type(mapping) in _DICTS
        self._wrappers = wrappers
        super().__init__(tied)

    def look_up(self) -> Iterator[Named]:
        """See `NamedTensors.look_up`."""
        return named_entries(self._mapping, self._wrappers)


def named_entries(mapping: Mapping[str, torch.Tensor], wrappers: str) -> Iterator[Named]:
    """The tensors of a state dict under the names that `StateDictSource` sends them by."""
    for key in mapping:
        if not isinstance(key, str):
            raise SourceError(f"a state dict has names for keys, not {key!r}")
    paths = [key for key in mapping if key.rpartition(".")[2] != _EXTRA_STATE]
    names = without_wrappers(paths) if wrappers == "strip" else paths
    for name, path in zip(names, paths, strict=True):
        yield Named(name, path, mapping[path])


class PairsSource(WeightSource):
    """Pairs of name and tensor that can be iterated again and again.

    ``pairs`` is called without arguments and gives fresh pairs, or a state dict
    (``model.named_parameters``); or it is an iterable that can be iterated anew, as a list. It is
    iterated once at the opening, for the specs, and once at every sync; a tensor is borrowed until
    the next one is asked for. An iterator, which can be read only once, is refused.
    """

    def __init__(self, pairs: Callable[[], Pairs] | Pairs, wrappers: str = "strip") -> None:
        if isinstance(pairs, Iterator):
            raise SourceError(
                f"a {type(pairs).__name__} can be read only once, and a push reads it for the "
                "specs first: push the function that makes it, as in push(model.named_parameters)"
            )
        if callable(pairs):
            _check_signature(pairs)
        self._pairs = pairs
        found: list[TensorSpec] = []
        try:
            for path, tensor in self._read():
                found.append(TensorSpec(path, tensor.dtype, tuple(tensor.shape)))
                del tensor  # it would be held while the next one is made
        except SourceError:
            raise
        except Exception as error:
            where = f"after {found[-1].name}" if found else "at its first pair"
            raise SourceError(
                f"the factory of pairs failed {where}: {type(error).__name__}: {error}"
            ) from error
        paths = [spec.name for spec in found]
        names = without_wrappers(paths) if wrappers == "strip" else paths
        check_names(zip(names, paths, strict=True))
        self._names = dict(zip(paths, names, strict=True))
        self._specs = [replace(spec, name=self._names[spec.name]) for spec in found]

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Found once, at the opening."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, tensor in self._read():
            yield self._names.get(path, path), tensor.detach()
            del tensor

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = self._pairs() if callable(self._pairs) else self._pairs
        if isinstance(pairs, Mapping):
            pairs = pairs.items()
        if not isinstance(pairs, Iterable):
            raise SourceError(
                f"the factory returned a {type(pairs).__name__}, not pairs of name and tensor"
            )
        index = 0  # enumerate() would hold the last pair
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise SourceError(
                    f"item {index} is a {type(pair).__name__}, not a pair of name and tensor"
                )
            check_tensor(*pair)
            yield pair
            del pair
            index += 1  # noqa: SIM113


def _check_signature(factory: Callable[..., object]) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        name = getattr(factory, "__qualname__", type(factory).__name__)
        raise SourceError(f"{name} must be callable without arguments: {error}") from None
    except ValueError:
        pass  # it does not tell
