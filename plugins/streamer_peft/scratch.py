"""Copies of single layers that may be written to, for PEFT merges in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Scratch:
    """Copies modules, with all submodules; each tensor is copied by ``copy_tensor``.

    What is copied once is used again, so that what is tied stays tied. Unlike ``copy.deepcopy`` it
    follows nothing but submodules and tensors: hooks and other attributes, which may lead to the
    whole model, are shared with the original.
    """

    def __init__(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copy_tensor = copy_tensor
        self._modules: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def copy(self, module: nn.Module) -> Any:
        """The copy of ``module``: made now, or the one that was made before."""
        if id(module) in self._modules:
            return self._modules[id(module)]
        copied = module.__class__.__new__(module.__class__)
        self._modules[id(module)] = copied
        children = {id(child) for child in module._modules.values()}
        for name, value in vars(module).items():
            if isinstance(value, nn.Module) and id(value) in children:
                value = self.copy(value)  # as torch.compile keeps what it wraps
            elif type(value) in (dict, list, set):
                value = value.copy()
            vars(copied)[name] = value
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self.copy(child)
        for name, parameter in module._parameters.items():
            copied._parameters[name] = None if parameter is None else self._copy(parameter)
        for name, buffer in module._buffers.items():
            copied._buffers[name] = None if buffer is None else self._copy(buffer)
        return copied

    def _copy(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._tensors:
            copied = self._copy_tensor(tensor.detach())
            parameter = isinstance(tensor, nn.Parameter)
            self._tensors[id(tensor)] = (
                nn.Parameter(copied, requires_grad=False) if parameter else copied
            )
        return self._tensors[id(tensor)]
