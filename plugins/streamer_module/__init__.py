"""Weights in this process's memory: a module, a state dict, pairs, or a source written for vLLM."""

from __future__ import annotations

from streamer.hookspecs import Register, hookimpl
from streamer_module.source import accepts, open_module

__all__ = ["accepts", "open_module", "streamer_register_sources"]


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``module`` and its claim to objects."""
    register(
        "module",
        open_module,
        accepts=accepts,
        summary="an nn.Module, a state dict, or a function that returns (name, tensor) pairs",
    )
