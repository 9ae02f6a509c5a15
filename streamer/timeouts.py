"""The three deadlines of a session, in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from streamer.exceptions import DeadlineExceeded, UsageError

_SLACK = 0.01
"""Seconds by which what waits may count less than we do."""
LONGEST = 10**6
"""Some waits count milliseconds in 32 bits: more than 24 days may be for ever."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds, of which none is more than a million.

    ``connect``: for a server to accept a connection, and for all ranks to join.
    ``progress``: for any one thing to go on: an answer, a chunk, a read.
    ``total``: for a whole push; ``None`` sets no limit, and ``progress`` still ends what is stuck.
    A broadcast that is under way then may take as long once more, and the code of a source as long
    as it likes: it is not interrupted.
    """

    connect: float = 60.0
    progress: float = 120.0
    total: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect", "progress", "total"):
            value = getattr(self, name)
            if value is None and name == "total":
                continue
            if not isinstance(value, int | float) or not 0 < value <= LONGEST:
                raise UsageError(f"the {name} timeout must be a time in seconds, not {value!r}")


class Clock:
    """The push under way: how long it has taken, and how long one more step may take."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._started: float | None = None
        self._cut = False

    def start(self) -> None:
        """A push begins."""
        self._started, self._cut = time.monotonic(), False

    def stop(self) -> None:
        """It is over: what follows is not held against its ``total``."""
        self._started = None

    @property
    def connect(self) -> float:
        """Seconds that joining may take from now."""
        return self._limit(self.timeouts.connect)

    @property
    def progress(self) -> float:
        """Seconds that the next step may take."""
        return self._limit(self.timeouts.progress)

    def check(self) -> None:
        """Raise `DeadlineExceeded` if the push has taken longer than its ``total``."""
        self._limit(self.timeouts.progress)

    def _limit(self, seconds: float) -> float:
        left = self._left()
        if left is None:
            return seconds
        if left <= 0:
            raise self._exceeded()
        self._cut = self._cut or left < seconds
        return min(seconds, left)

    def told(self, error: BaseException) -> BaseException:
        """``error``, or what it means if the push had no more time: that, and not who was waited
        for when it ran out. For where an error is seen first, before anything is tidied up.
        """
        left = self._left()
        over = left is not None and left < _SLACK and self._cut
        if not over or not isinstance(error, DeadlineExceeded):
            return error
        told = self._exceeded()
        if error.args == told.args:
            return error
        told.held, told.__cause__ = error.held, error
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        return told

    def _left(self) -> float | None:
        """Seconds until the limit of the whole push, if there is one."""
        if self.timeouts.total is None or self._started is None:
            return None
        return self._started + self.timeouts.total - time.monotonic()

    def _exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the push took longer than its limit of {self.timeouts.total:g} s")


def seconds(value: float) -> str:
    """A time for a message, in two digits or whole: ``0.0013``, ``2.5``, ``600``."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
