"""What a sync did, in numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from streamer.trace import PHASES

if TYPE_CHECKING:
    from streamer.plan import Plan
    from streamer.trace import Trace


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock seconds of a sync, phase by phase.

    ``open``: opening and checking the source. ``connect``: asking the servers, rendezvous and
    warm-up; some milliseconds, to see that all are still there, when the session was connected
    already. ``update``: from pause to the last byte
    received. ``finish``: from there until the servers answer requests again. ``total``: all of it.
    ``verify`` is no phase of its own: what proving the arrival has cost in them, on the rank or
    the server where it took longest.
    """

    open: float
    connect: float
    update: float
    finish: float
    total: float
    verify: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server that took part.

    ``verified``: how the arrival was proven, None if that was not asked. ``digest``: every worker
    has received exactly what was sent. ``changed``: the checksums of a server that cannot tell more
    are others than before. ``not proven``: they are the same, which they also are if the same
    weights were sent. ``paused``: its user had paused it before the sync, and it still is: it
    answers no request until it is resumed.
    """

    url: str
    world_size: int
    version: str
    verified: str | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a sync did.

    ``tensors``, ``bytes`` of weights and ``chunks`` were sent once, to all ``servers`` together;
    0 if all of them had this ``weight_version`` already.
    """

    tensors: int
    bytes: int
    chunks: int
    seconds: Seconds
    weight_version: str
    servers: tuple[ServerReport, ...]

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9) a second during ``update``."""
        return self.bytes / 1e9 / self.seconds.update if self.seconds.update else 0.0

    def as_json(self) -> dict[str, Any]:
        """The report as JSON types: the object that ``streamer push --json`` prints."""
        values = asdict(self)
        values["seconds"] = {name: round(value, 6) for name, value in values["seconds"].items()}
        values["gb_per_s"] = round(self.gb_per_s, 3)
        order = ("tensors", "bytes", "chunks", "seconds", "gb_per_s", "weight_version", "servers")
        return {name: values[name] for name in order}


class Stopwatch:
    """Times the phases of a sync, one after the other, from the moment that it is made.

    Each is a span of ``trace``.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._started = self._last = time.perf_counter()
        self._laps = {"open": 0.0, "connect": 0.0, "update": 0.0, "finish": 0.0}

    def lap(self, phase: str, **details: float) -> None:
        """``phase``, a field of `Seconds`, ends now. ``details`` go with its span."""
        now = time.perf_counter()
        self._trace.add(phase, self._last, row=PHASES, **details)
        self._laps[phase] = now - self._last
        self._last = now

    def seconds(self, verify: float) -> Seconds:
        """Up to the last lap; a phase that did not come has taken none."""
        return Seconds(**self._laps, total=self._last - self._started, verify=verify)


def make_report(
    plan: Plan | None,
    weight_version: str,
    watch: Stopwatch,
    verify: float,
    servers: Sequence[ServerReport],
) -> Report:
    """The report of a sync that has sent ``plan``; nothing if that is None."""
    return Report(
        tensors=plan.tensors if plan else 0,
        bytes=plan.nbytes if plan else 0,
        chunks=len(plan.chunks) if plan else 0,
        seconds=watch.seconds(verify),
        weight_version=weight_version,
        servers=tuple(servers),
    )
