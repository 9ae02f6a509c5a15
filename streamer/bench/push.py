"""End to end: real pushes into a running server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from streamer.api import connect
from streamer.bench.measure import PUSH, Row, repeated
from streamer.defaults import MIB
from streamer.options import ConnectOptions
from streamer.session import Session
from streamer.source import WeightSource, specs_of
from streamer.trace import Trace

SIZES = (16 * MIB, 64 * MIB, 256 * MIB)
_LEAST_CHUNKS = 2
"""With fewer nothing can overlap."""


def measure_push(
    source: WeightSource, urls: Sequence[str], repeats: int, options: ConnectOptions
) -> Iterator[Row]:
    """Rates of connected pushes by the size of a chunk, from opening the source to the answer."""
    nbytes = sum(spec.nbytes for spec in specs_of(source))
    for size in SIZES:
        if size == SIZES[0] or size * _LEAST_CHUNKS <= nbytes:
            with connect(urls, **_with(options, size, Trace(enabled=False))) as session:

                def run(session: Session = session) -> float:
                    return session.push(source, force=True).seconds.total

                seconds = repeated(run, repeats)
                workers = [server.device for server in session.servers]
            detail = f"{len(workers)} server" + ("s" if len(workers) > 1 else "")
            setting = f"{size // MIB} MiB a chunk"
            yield Row(PUSH, setting, size, nbytes, seconds, workers[0], detail)


def trace_push(
    source: WeightSource, urls: Sequence[str], size: int, options: ConnectOptions, path: Path
) -> None:
    """Write the timeline of one connected push with chunks of ``size`` bytes to ``path``."""
    trace = Trace(enabled=False)
    with connect(urls, **_with(options, size, trace)) as session:
        session.push(source, force=True)
        trace.enabled = True
        session.push(source, force=True)
        trace.write(path)


def _with(options: ConnectOptions, size: int, trace: Trace) -> ConnectOptions:
    changed = options.copy()
    changed["buffer_size"], changed["trace"] = size, trace
    return changed
