"""A source of nothing, and a plugin that registers it."""

from __future__ import annotations

from types import ModuleType

import torch

from streamer import (
    TensorSpec,
    WeightSource,
    hookimpl,
)
from streamer.events import SyncStarted

EVENT = SyncStarted(1, 4, 1, ("http://host:1",))


class Plain(WeightSource):
    def __init__(self, rest, **options):
        self.rest = rest
        self.options = options

    def specs(self):
        return [TensorSpec("w", torch.float32, (1,))]

    def __iter__(self):
        yield "w", torch.zeros(1)


def plugin_of(scheme="x", factory=Plain, **claims):
    """A plugin that registers one scheme."""
    module = ModuleType(f"plugin_{scheme}")

    @hookimpl
    def streamer_register_sources(register):
        register(scheme, factory, **claims)

    module.streamer_register_sources = streamer_register_sources
    return module
