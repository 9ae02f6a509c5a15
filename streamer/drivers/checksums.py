"""Proof of arrival from a server whose engine tells no digest: its checksums, before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from streamer.exceptions import IncompatibleServer, VerificationError
from streamer.verify import CHANGED, NOT_PROVEN, Sent


class ChecksumProof:
    """Compares what ``/weight_checker`` says of a server's parameters, sync after sync.

    The checksums are those of the parameters as they run, fused and maybe quantized, so they cannot
    be computed here: they only tell whether anything has changed.
    """

    def __init__(self, url: str, checksums: Callable[[], object]) -> None:
        """``checksums()`` asks the server."""
        self._url = url
        self._ask = checksums
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._sent: Sent | None = None
        self.seconds = 0.0
        """What asking has cost in this sync."""

    def begin(self, *, ask: bool) -> None:
        """A sync begins. ``ask`` is False if the server is in no state to answer."""
        self.seconds = 0.0
        self._before = self._checksums() if ask else None

    def prove(self, sent: Sent) -> str:
        """The update is closed: whether the server holds something else than before.

        Raises `VerificationError` if it does not, though other weights were sent than last time:
        then one of the two syncs has not arrived.
        """
        last, self._sent = self._sent, sent
        unchanged_since = self._after is not None and self._after == self._before
        self._after = self._checksums()
        if self._before is None:
            return NOT_PROVEN
        if self._before != self._after:
            return CHANGED
        if unchanged_since and last is not None and last.calls == sent.calls and last != sent:
            pairs = zip(last.digests, sent.digests, strict=True)
            then, now = next((then, now) for then, now in pairs if then != now)
            raise VerificationError(
                f"{self._url} holds the same weights as before, though others were sent than last "
                f"time (digest {then} then, {now} now): nothing has arrived, and it answered 200; "
                "look for NCCL errors in its log and restart it"
            )
        return NOT_PROVEN

    def _checksums(self) -> dict[str, Any]:
        started = time.monotonic()
        sums = self._ask()
        self.seconds += time.monotonic() - started
        if not isinstance(sums, dict):
            raise IncompatibleServer(
                f"{self._url}/weight_checker answered no checksums: push without verify"
            )
        return sums
