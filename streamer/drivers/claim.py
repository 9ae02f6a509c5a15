"""Whether a server is still this trainer's: it goes by what the server calls its weights."""

from __future__ import annotations

import time

from streamer.drivers.mark import is_incomplete
from streamer.drivers.routes import Routes
from streamer.drivers.state import SyncState
from streamer.exceptions import ServerError, ServerRefused
from streamer.timeouts import Clock

_FRESH = 0.1
"""Seconds for which a server counts as paused, or not, as it has said it is."""


class Taken(Exception):
    """Another trainer has taken the server over: what is open there is its own."""


class Claim:
    """Asks the server, and takes note of what it says in ``state``."""

    def __init__(self, routes: Routes, state: SyncState, clock: Clock) -> None:
        self._routes = routes
        self._state = state
        self._clock = clock
        self._said_paused = (False, float("-inf"))  # and when

    def is_ours(self) -> bool:
        """See `streamer.drivers.base.Driver`."""
        version, paused = self._ask_both()
        self._said_paused = (paused, time.monotonic())  # `look` follows, and wants to know
        ours = version == self._state.version
        self._state.note(version)
        return ours

    def look(self) -> bool:
        """Take note of what the server holds, unless it has just been asked; whether it is paused.

        Raises `ServerError` if another trainer has begun to push since we have joined.
        """
        paused, when = self._said_paused
        if time.monotonic() - when > _FRESH:
            paused = self._look_again()
        if paused and not self._state.must_resume and not self._state.is_torn:
            # Both were asked at once: who has paused it may have marked it a moment before, or is
            # about to resume it.
            paused = self._look_again()
        return paused

    def _look_again(self) -> bool:
        version, paused = self._ask_both()
        if is_incomplete(version) and version != self._state.version:
            raise ServerError(
                f"{self._routes.url}: another trainer has begun to push since this one has joined: "
                f"its weights are named {self._routes.hide(repr(version))}; push again when that "
                "is over"
            )
        self._state.note(version)
        return paused

    def _ask_both(self) -> tuple[str | None, bool]:
        return self._routes.version_and_pause(self._clock.progress)

    def check_mark(self) -> None:
        """Raise `ServerError` unless the server has the mark of this sync.

        A trainer that was suspended would finish what another one has begun meanwhile.
        """
        said = self._routes.weight_version(self._clock.progress)
        if said != self._state.mark:
            raise ServerError(
                f"{self._routes.url}: another trainer has pushed since this sync began, or the "
                f"server was restarted: its weights are named {self._routes.hide(repr(said))}, and "
                f"not {self._state.mark!r}; this sync is not finished there; push again"
            )

    def named(self, timeout: float) -> str | None:
        """What the server calls its weights. Raises `Taken` if that is another trainer's doing.

        ``timeout`` in seconds, for each of two calls where a gateway may have refused the first.
        """
        try:
            named = self._routes.weight_version(timeout)
        except ServerRefused:
            named = self._routes.weight_version(timeout)
        if self._state.is_taken(named):
            self._state.must_resume = False  # that is its affair now
            raise Taken
        return named
