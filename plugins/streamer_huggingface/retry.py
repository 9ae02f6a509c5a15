"""When to ask again."""

from __future__ import annotations

import email.utils
import threading
import time

from streamer_huggingface.worker import Failure

TRIES = 5
"""Requests in a row that may fail for a passing reason."""
FIRST_WAIT = 0.5
"""Seconds before the second try, doubled before each next one."""
LONGEST_WAIT = 300.0
"""Seconds of a Retry-After that are still waited; the Hub counts requests in windows of 300."""


class ToldWaits:
    """Waits that a server has asked for, for `WeightSource.progress`: none is standing still."""

    def __init__(self) -> None:
        self._until = 0.0

    def add(self, seconds: float) -> None:
        """A wait begins. One that is too long counts for nothing."""
        if seconds <= LONGEST_WAIT:
            self._until = max(self._until, time.monotonic() + seconds)

    def progress(self) -> int:
        """A number that grows as long as one of them lasts, and no longer."""
        return int(1000 * min(time.monotonic(), self._until))


class Retries:
    """The tries of one request. Only for GETs, which change nothing.

    ``stop`` ends a wait early, as one more failure. ``told`` gets the waits that the
    server has asked for.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        told: ToldWaits | None = None,
    ) -> None:
        self._stop = stop or threading.Event()
        self._told = told or ToldWaits()
        self._failed = 0

    def again(self, failure: Failure) -> bool:
        """Whether to try again; if so, this has waited, for as long as the server has asked."""
        self._failed += 1
        if not failure.transient or self._failed >= TRIES:
            return False
        asked = _seconds(failure.retry_after)
        wait = FIRST_WAIT * 2 ** (self._failed - 1) if asked is None else asked
        if wait > LONGEST_WAIT:
            return False
        if asked is not None:
            self._told.add(asked)
        return not self._stop.wait(wait)

    def progress(self) -> None:
        """Something went well: count from the start."""
        self._failed = 0


def _seconds(retry_after: str) -> float | None:
    """What a Retry-After asks for: seconds, or a date."""
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        date = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(date.timestamp() - time.time(), 0.0)
