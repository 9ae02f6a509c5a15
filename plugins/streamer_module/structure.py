"""How a module is put together: its tensors in traversal order, wrappers seen through, and kinds.

Classes are told by name and package, so that nothing is imported that the module has not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

# Class and package of what adds a name to its one child, and that name.
_WRAPPERS = {
    ("DistributedDataParallel", "torch.nn.parallel"): "module",
    ("DataParallel", "torch.nn.parallel"): "module",
    ("OptimizedModule", "torch._dynamo"): "_orig_mod",
    ("ActivationWrapper", "torch.distributed"): "_checkpoint_wrapped_module",
    ("FullyShardedDataParallel", "torch.distributed.fsdp"): "_fsdp_wrapped_module",
}
_RESERVED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_FIRST = "module."
_ADAPTER = re.compile(
    r"base_model\.model\.|(.*\.)?(lora_|base_layer\.[^.]+$|modules_to_save\.|original_module\.)"
)

Resolve = Callable[[nn.Module], tuple[nn.Module, str]]
"""The module that stands in for another one, under its name, and the path from one to the other."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or persistent buffer: its name without wrappers, and where it is kept.

    ``path`` is its name in ``state_dict()``, ``key`` that part of it that ``owner`` knows it by.
    """

    name: str
    path: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        held = self.owner._parameters.get(self.key)
        tensor = self.owner._buffers[self.key] if held is None else held
        assert tensor is not None
        return tensor


def walk(module: nn.Module, resolve: Resolve = lambda module: (module, "")) -> Iterator[Place]:
    """Every parameter and persistent buffer, in the order and under the paths of ``state_dict()``.

    That of a tensor with two names comes twice. ``name`` lacks the parts that wrappers add, which
    are found by the wrapper's class: a submodule or parameter that is called ``module`` keeps it.
    """
    for name, path, part in walk_modules(module, resolve):
        for key, _ in own_tensors(part):
            yield Place(name + key, path + key, part, key)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and persistent buffers of ``module`` itself, not of modules inside it."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer


def walk_modules(
    module: nn.Module,
    resolve: Resolve = lambda module: (module, ""),
    name: str = "",
    path: str = "",
) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module, parents first, behind what comes before the names of its own tensors.

    That is, first without wrappers and then with them. A module that is used twice comes twice.
    """
    module, inner = resolve(module)
    path += inner
    yield name, path, module
    wrapped = _wrapped(module)
    for key, child in module._modules.items():
        if child is not None:
            part = "" if key == wrapped else f"{key}."
            yield from walk_modules(child, resolve, name + part, f"{path}{key}.")


def _wrapped(module: nn.Module) -> str | None:
    """The name of the child that ``module`` wraps, if it is a wrapper."""
    for (name, package), attribute in _WRAPPERS.items():
        if is_a(module, name, package):
            return attribute
    return None


def without_wrappers(paths: Iterable[str]) -> list[str]:
    """Names without what wrappers put into them, told from the names alone.

    Torch's own underscored parts go wherever they are. ``module.`` goes once, and only if every
    name starts with it, as after DistributedDataParallel.
    """
    names = list(paths)
    everything = "\n".join(names)
    for index, path in enumerate(names if any(part in everything for part in _RESERVED) else ()):
        *parts, last = path.split(".")
        names[index] = ".".join([*(part for part in parts if part not in _RESERVED), last])
    if names and all(name.startswith(_FIRST) for name in names):
        return [name.removeprefix(_FIRST) for name in names]
    return names


def is_of_adapter(name: str) -> bool:
    """Whether it is a name that PEFT gives: of an adapter, or of what that replaces."""
    return _ADAPTER.match(name) is not None


def is_a(thing: object, name: str, package: str) -> bool:
    """Whether a class of this name, from ``package`` or below, is among the bases of ``thing``."""
    return _is_subclass(type(thing), name, package)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _is_subclass(kind: type, name: str, package: str) -> bool:
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{package}.")
        for base in kind.__mro__
    )


def is_sharded_tensor(tensor: object) -> bool:
    """Whether this rank holds only a part of the tensor."""
    return _is_sharded_kind(type(tensor))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _is_sharded_kind(kind: type) -> bool:
    return _is_subclass(kind, "DTensor", "torch.distributed") or _is_subclass(
        kind, "FlatParameter", "torch.distributed.fsdp"
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` is FSDP's, of either kind, or has DTensors."""
    return any(map(is_sharded_tensor, (*module.parameters(), *module.buffers()))) or any(
        is_a(part, name, "torch.distributed.fsdp")
        for part in module.modules()
        for name in ("FSDPModule", "FullyShardedDataParallel")
    )


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put an adapter into ``module``, or wrapped it."""
    kinds = {base for part in module.modules() for base in type(part).__mro__}
    return any(f"{kind.__module__}.".startswith("peft.") for kind in kinds)
