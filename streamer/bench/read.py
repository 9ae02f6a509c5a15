"""Reading: a source through our own readers into staging memory, and on into a device."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence

import torch

from streamer.bench.measure import READ, STAGE, Row, repeated, timed
from streamer.bench.null import NullTransport
from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.defaults import DEFAULT_THREADS, MIB
from streamer.plan import Plan, make_plan
from streamer.source import TensorSpec, WeightSource, checked, specs_of
from streamer.timeouts import Timeouts

SAMPLE = 4 << 30
"""Bytes of a source that are read: its first tensors."""
_BUFFER_SIZE = 64 * MIB


class Reading:
    """The staging of a push whose broadcasts go nowhere. Close it."""

    def __init__(
        self, source: WeightSource, device: torch.device, threads: int, *, sample: int = SAMPLE
    ) -> None:
        self._source = source
        self._all = specs_of(source)
        self._transport = NullTransport(device)
        self._broadcaster = Broadcaster(self._transport, threads=threads)
        self.plan = make_plan(_first(self._all, sample), buffer_size=_BUFFER_SIZE)

    def run(self) -> None:
        """Stage the sample once."""

        def conduct(stream: ChunkStream) -> None:
            for call in self.plan.calls:
                stream.send(call)
            self._transport.wait(_patience(self.plan))

        with contextlib.closing(checked(self._source, self._all)) as payloads:
            sample = itertools.islice(payloads, self.plan.tensors)
            self._broadcaster.sync(
                self.plan,
                sample,
                conduct,
                source=self._source,
                progress_timeout=Timeouts().progress,
            )

    def close(self) -> None:
        """Free the memory and the threads."""
        self._transport.close()
        self._broadcaster.close()


def measure_read(source: WeightSource, repeats: int, *, cached: bool) -> Iterator[Row]:
    """Rates into host memory by the number of threads.

    Unless the source is known to be in the page cache (``cached``), how long the first time takes
    is a row of its own.
    """
    cpu = torch.device("cpu")
    if not cached:
        with contextlib.closing(Reading(source, cpu, DEFAULT_THREADS)) as reading:
            seconds = timed(reading.run)()
        yield Row(
            READ, "first time", 0, reading.plan.nbytes, (seconds,), detail="from disk, or cache"
        )
    for threads in thread_counts():
        yield _row(source, cpu, threads, repeats)


def measure_stage(source: WeightSource, device: torch.device, repeats: int) -> Iterator[Row]:
    """Rates into the memory of the CUDA ``device``, through pinned memory, as a push does it."""
    for threads in thread_counts():
        if threads >= min(8, DEFAULT_THREADS):
            yield _row(source, device, threads, repeats)


def _row(source: WeightSource, device: torch.device, threads: int, repeats: int) -> Row:
    with contextlib.closing(Reading(source, device, threads)) as reading:
        seconds = repeated(timed(reading.run), repeats)
    setting = f"{threads} thread" + ("s" if threads > 1 else "")
    stage = READ if device.type == "cpu" else STAGE
    return Row(stage, setting, threads, reading.plan.nbytes, seconds, device.type)


def thread_counts() -> list[int]:
    """What is worth trying on this machine, and the default."""
    cores = len(os.sched_getaffinity(0))
    worth = [threads for threads in (1, 2, 4, 8, 16, 24, 32) if threads <= max(4, cores)]
    return sorted({*worth, DEFAULT_THREADS})


def _first(specs: Sequence[TensorSpec], nbytes: int) -> list[TensorSpec]:
    """The first ``specs``, up to the one that reaches ``nbytes`` bytes."""
    ends = itertools.accumulate(spec.nbytes for spec in specs)
    count = sum(1 for _ in itertools.takewhile(lambda end: end < nbytes, ends))
    return list(specs[: count + 1])


def _patience(plan: Plan) -> float:
    """Seconds for copies to the device that are under way: far more than any bus needs."""
    return 30.0 + plan.nbytes / 1e9
