"""Checkpoint files and folders in the safetensors format: ``safetensors://path``."""

from __future__ import annotations

from streamer.hookspecs import Register, hookimpl
from streamer_safetensors.source import SafetensorsSource

__all__ = ["SafetensorsSource", "streamer_register_sources"]


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``safetensors://``."""
    register(
        "safetensors",
        SafetensorsSource,  # SourceFactory asks for **options of anyone
        summary="a .safetensors file, a checkpoint folder, or its index: safetensors://path",
    )
