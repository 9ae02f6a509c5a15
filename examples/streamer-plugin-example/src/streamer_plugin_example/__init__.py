"""``acme://folder``: a checkpoint of the in-house trainer Acme, under the served model's names."""

from __future__ import annotations

from streamer import hookimpl
from streamer.hookspecs import Register
from streamer_plugin_example.source import AcmeSource

__all__ = ["AcmeSource", "streamer_register_sources"]


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``acme://``."""
    register("acme", AcmeSource, summary="a step of the Acme trainer: acme://runs/7/step-000120")
