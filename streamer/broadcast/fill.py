"""What is to be read into one buffer, cut into jobs for many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

SLOT_SIZE = 8 << 20
"""Bytes that one read job moves, and the size of a pinned slot."""
ReadInto = Callable[[memoryview, int, int], None]
Segment = tuple[ReadInto, int, int, int]
"""Bytes ``[start, stop)`` of a payload, and the offset in the buffer where they belong."""


class Fill:
    """The filling of one buffer: what is to be read, and how far that is."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.segments: list[Segment] = []
        self.error: BaseException | None = None
        """What the first read that failed has raised."""
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._done.set()

    def wait(self, timeout: float) -> bool:
        """Whether every read has ended, well or not, within ``timeout`` seconds."""
        return self._done.wait(timeout)

    def begin(self, reads: int) -> None:
        """``reads`` jobs will call `end`."""
        if reads:
            self._left = reads
            self._done.clear()

    def end(self, error: BaseException | None) -> None:
        """A job is through."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._done.set()


def cut_regions(segments: list[Segment]) -> list[list[Segment]]:
    """Cut ``segments`` into runs without gaps of at most `SLOT_SIZE` bytes."""
    regions: list[list[Segment]] = []
    size, end = SLOT_SIZE, -1
    for read_into, start, stop, offset in sorted(segments, key=lambda segment: segment[3]):
        at = start
        while at < stop:
            place = offset + at - start
            if place != end or size == SLOT_SIZE:
                regions.append([])
                size = 0
            until = min(stop, at + SLOT_SIZE - size)
            regions[-1].append((read_into, at, until, place))
            size += until - at
            end = place + until - at
            at = until
    return regions


def bounds(region: list[Segment]) -> tuple[int, int]:
    """Where a region starts and ends in its buffer."""
    _, start, stop, offset = region[-1]
    return region[0][3], offset + stop - start


def read(region: list[Segment], view: memoryview, guard: Callable[[], None]) -> None:
    base = region[0][3]
    for read_into, start, stop, offset in region:
        guard()
        read_into(view[offset - base : offset - base + stop - start], start, stop)
