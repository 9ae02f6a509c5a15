"""The hooks that a plugin may implement, and the marker to do so.

A plugin is a module (or any object) named in the entry-point group ``streamer``::

    [project.entry-points.streamer]
    mytrainer = "streamer_mytrainer"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pluggy

from streamer.events import Event
from streamer.source import WeightSource

PROJECT = "streamer"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as a hook: `streamer_register_sources`, or `streamer_on_event`."""


SourceFactory = Callable[..., WeightSource]
"""``factory(rest, **options)`` opens a source, or raises `streamer.SourceError`.

``rest`` is what follows ``scheme://``, or the object that was claimed; ``options`` are the keyword
parameters that the factory declares. A class whose ``__init__`` takes ``rest`` is a factory.
"""


class Register(Protocol):
    """The callback that `streamer_register_sources` receives."""

    def __call__(
        self,
        scheme: str,
        factory: SourceFactory,
        *,
        accepts: Callable[[object], bool] | None = None,
        summary: str = "",
    ) -> None:
        """Register a URI scheme and, with ``accepts``, a claim to objects.

        ``factory(rest, **options)`` is called for ``scheme://rest``, and with the object itself
        for an object that ``accepts(obj)`` claims. ``summary`` is a line for ``streamer sources``.
        Raises `streamer.PluginError` if the scheme is taken or malformed, and for what cannot be
        called.
        """


@hookspec
def streamer_register_sources(register: Register) -> None:
    """Register the sources of a plugin.

    Called once a process, at the first `streamer.open_source`. Import heavy libraries in the
    factory, not here. A plugin that raises is set aside with its error; the others go on.
    """


@hookspec
def streamer_on_event(event: Event) -> None:
    """Observe a sync. ``event`` is one of the frozen classes of `streamer.events`.

    Called on the thread that pushes, between chunks: return quickly. What it raises is logged and
    never stops a sync.
    """
