"""Stream model weights from anywhere into running inference servers.

streamer.push("/models/Qwen3-8B", to="http://localhost:8000")

with streamer.connect("http://localhost:8000") as session:
    for step in range(steps):
        train()
        session.push(model)
"""

from streamer.aio import aconnect, apush
from streamer.drivers.engine import Engine
from streamer.drivers.sync_client import WeightSyncClient
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
from streamer.hookspecs import hookimpl
from streamer.options import ConnectOptions
from streamer.plan import Plan, make_plan
from streamer.ranks import Ranks
from streamer.registry import open_source, register_plugin
from streamer.report import Report
from streamer.session import Session, connect, push
from streamer.source import DeferredTensor, Payload, TensorSpec, WeightSource
from streamer.timeouts import Timeouts
from streamer.trace import Trace
from streamer.transforms import cast, exclude, map_tensors, rename, select

__all__ = [
    "ConnectOptions",
    "DeadlineExceeded",
    "DeferredTensor",
    "Engine",
    "IncompatibleServer",
    "Payload",
    "Plan",
    "PlanError",
    "PluginError",
    "PushCancelled",
    "RankError",
    "Ranks",
    "Report",
    "ServerError",
    "ServerRefused",
    "ServerUnreachable",
    "Session",
    "SourceError",
    "SpecMismatch",
    "StreamerError",
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
