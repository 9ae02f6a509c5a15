"""Weights that are sharded over the ranks of a trainer: FSDP2, FSDP1, tensor parallel, DTensors."""

from __future__ import annotations

from streamer.hookspecs import Register, hookimpl
from streamer_fsdp.opening import accepts, open_fsdp

__all__ = ["accepts", "open_fsdp", "streamer_register_sources"]


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``fsdp`` and its claim to objects."""
    register(
        "fsdp",
        open_fsdp,
        accepts=accepts,
        summary="an nn.Module or a state dict that is sharded over ranks: FSDP, DTensor",
    )
