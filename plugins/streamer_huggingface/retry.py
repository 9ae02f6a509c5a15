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


class Retries:
    """The tries of one request. Only for GETs, which change nothing.

    ``stop`` ends a wait early, as one more failure.
    """

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._failed = 0

    def again(self, failure: Failure) -> bool:
        """Whether to try again; if so, this has waited, for as long as the server has asked."""
        self._failed += 1
        if not failure.transient or self._failed >= TRIES:
            return False
        asked = _seconds(failure.retry_after)
        wait = FIRST_WAIT * 2 ** (self._failed - 1) if asked is None else asked
        return wait <= LONGEST_WAIT and not self._stop.wait(wait)

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
