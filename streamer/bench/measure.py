"""How a stage is timed: rows of repeats, and a deadline that ends whatever it waits for."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from streamer.exceptions import DeadlineExceeded

READ, COPY, STAGE, BROADCAST, PUSH = (
    "read",
    "host to device",
    "read to device",
    "broadcast",
    "end to end",
)
"""The stages, in the order in which bytes pass them; `PUSH` is all of them at once."""

_ENOUGH_SECONDS = 10.0
"""A row that has taken so long is not repeated any more."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of a stage: ``nbytes`` bytes moved once in each of ``seconds``.

    ``setting`` is ``value`` for a reader: the number of threads, or the bytes of one piece (0: it
    has none). ``device`` is the type of the device that they move to; ``detail`` says more.
    """

    stage: str
    setting: str
    value: int
    nbytes: int
    seconds: tuple[float, ...]
    device: str = "cpu"
    detail: str = ""

    @property
    def median(self) -> float:
        """The median of ``seconds``."""
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9) a second, in the median."""
        return self.nbytes / 1e9 / self.median


def repeated(step: Callable[[], float], repeats: int) -> tuple[float, ...]:
    """What ``step`` returns, in seconds, ``repeats`` times after one that is not counted.

    The first allocates, connects and warms caches. Fewer, but at least one, if they take long.
    """
    started = time.perf_counter()
    step()
    seconds = [step()]
    while len(seconds) < repeats and time.perf_counter() - started < _ENOUGH_SECONDS:
        seconds.append(step())
    return tuple(seconds)


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """``step``, returning the seconds it took."""

    def run() -> float:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    return run


@contextlib.contextmanager
def deadline(stage: str, seconds: float) -> Iterator[None]:
    """Raise `DeadlineExceeded` within the block after ``seconds``, whatever Python waits for there.

    Only on the main thread, where signals are handled.
    """

    def over(number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded(
            f"{stage}: not measured within {seconds:g} s; give a longer --deadline, or less to move"
        )

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's alarm, which goes on
            left = max(left - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
