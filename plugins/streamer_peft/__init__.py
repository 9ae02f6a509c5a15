"""Models with adapters, merged on the way: a PEFT model, or ``peft://adapter?base=checkpoint``."""

from __future__ import annotations

from streamer.hookspecs import Register, hookimpl
from streamer_peft.source import accepts, open_peft

__all__ = ["accepts", "open_peft", "streamer_register_sources"]


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``peft`` and its claim to objects."""
    register(
        "peft",
        open_peft,
        accepts=accepts,
        summary="a PEFT model, or an adapter over a base: peft://ADAPTER?base=CHECKPOINT",
    )
