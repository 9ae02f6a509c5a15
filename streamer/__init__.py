"""Stream model weights from anywhere into running inference servers.

Once, or after every step over one connection:

    streamer.push("/models/Qwen3-8B", to="http://localhost:8000")

    with streamer.connect("http://localhost:8000") as session:
        for step in range(steps):
            train()
            session.push(model)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.aio import aconnect, apush
    from streamer.api import connect, push
    from streamer.drivers.base import ServerInfo
    from streamer.drivers.engine import Engine
    from streamer.drivers.sync_client import WeightSyncClient
    from streamer.events import ChunkSent, Event, SyncFailed, SyncFinished, SyncStarted
    from streamer.exceptions import (
        DeadlineExceeded,
        IncompatibleServer,
        PlanError,
        PluginError,
        PushCancelled,
        RankError,
        ServerError,
        ServerRefused,
        ServerUnreachable,
        SourceError,
        SpecMismatch,
        StreamerError,
        TransportError,
        UsageError,
        VerificationError,
    )
    from streamer.held import Held, Remedy
    from streamer.hookspecs import hookimpl
    from streamer.options import ConnectOptions
    from streamer.plan import Plan, make_plan
    from streamer.ranks import Ranks
    from streamer.registry import open_source, register_plugin
    from streamer.report import Report, Seconds, ServerReport
    from streamer.session import Session
    from streamer.source import DeferredTensor, Payload, TensorSpec, WeightSource
    from streamer.timeouts import Timeouts
    from streamer.trace import Trace
    from streamer.transforms import cast, exclude, map_tensors, rename, select

__all__ = [
    "ChunkSent",
    "ConnectOptions",
    "DeadlineExceeded",
    "DeferredTensor",
    "Engine",
    "Event",
    "Held",
    "IncompatibleServer",
    "Payload",
    "Plan",
    "PlanError",
    "PluginError",
    "PushCancelled",
    "RankError",
    "Ranks",
    "Remedy",
    "Report",
    "Seconds",
    "ServerError",
    "ServerInfo",
    "ServerRefused",
    "ServerReport",
    "ServerUnreachable",
    "Session",
    "SourceError",
    "SpecMismatch",
    "StreamerError",
    "SyncFailed",
    "SyncFinished",
    "SyncStarted",
    "TensorSpec",
    "Timeouts",
    "Trace",
    "TransportError",
    "UsageError",
    "VerificationError",
    "WeightSource",
    "WeightSyncClient",
    "aconnect",
    "apush",
    "cast",
    "connect",
    "exclude",
    "hookimpl",
    "make_plan",
    "map_tensors",
    "open_source",
    "push",
    "register_plugin",
    "rename",
    "select",
]

_HOMES = {
    "ChunkSent": "events",
    "ConnectOptions": "options",
    "DeadlineExceeded": "exceptions",
    "DeferredTensor": "source",
    "Engine": "drivers.engine",
    "Event": "events",
    "Held": "held",
    "IncompatibleServer": "exceptions",
    "Payload": "source",
    "Plan": "plan",
    "PlanError": "exceptions",
    "PluginError": "exceptions",
    "PushCancelled": "exceptions",
    "RankError": "exceptions",
    "Ranks": "ranks",
    "Remedy": "held",
    "Report": "report",
    "Seconds": "report",
    "ServerError": "exceptions",
    "ServerInfo": "drivers.base",
    "ServerRefused": "exceptions",
    "ServerReport": "report",
    "ServerUnreachable": "exceptions",
    "Session": "session",
    "SourceError": "exceptions",
    "SpecMismatch": "exceptions",
    "StreamerError": "exceptions",
    "SyncFailed": "events",
    "SyncFinished": "events",
    "SyncStarted": "events",
    "TensorSpec": "source",
    "Timeouts": "timeouts",
    "Trace": "trace",
    "TransportError": "exceptions",
    "UsageError": "exceptions",
    "VerificationError": "exceptions",
    "WeightSource": "source",
    "WeightSyncClient": "drivers.sync_client",
    "aconnect": "aio",
    "apush": "aio",
    "cast": "transforms",
    "connect": "api",
    "exclude": "transforms",
    "hookimpl": "hookspecs",
    "make_plan": "plan",
    "map_tensors": "transforms",
    "open_source": "registry",
    "push": "api",
    "register_plugin": "registry",
    "rename": "transforms",
    "select": "transforms",
}
"""The module of each name above."""

if not TYPE_CHECKING:
    # To import torch takes seconds: a usage error or the front of a server need not wait for it.
    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'streamer' has no attribute {name!r}")
        module = importlib.import_module(f"streamer.{_HOMES[name]}")
        value = globals()[name] = getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
