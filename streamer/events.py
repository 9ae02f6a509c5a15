"""What a sync tells its observers: the hook `streamer_on_event` and the progress callback."""

from __future__ import annotations

from dataclasses import dataclass

from streamer.report import Report


@dataclass(frozen=True, slots=True)
class SyncStarted:
    """Everything was checked; nothing has been sent."""

    tensors: int
    bytes: int
    chunks: int
    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """Chunks were handed to the transport; ``bytes`` counts all of this sync so far."""

    bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class SyncFinished:
    """Every server serves the new weights."""

    report: Report


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """The sync ended with ``error``, which is about to be raised."""

    error: BaseException


Event = SyncStarted | ChunkSent | SyncFinished | SyncFailed
"""What ``on_event`` and `streamer_on_event` are called with: the start, the chunks, and the end."""
