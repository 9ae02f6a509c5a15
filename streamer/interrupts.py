"""What ends a sync from outside: a signal, or another thread. The stream is completed first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from streamer.exceptions import PushCancelled, StreamerError

if TYPE_CHECKING:
    from streamer.source import Payload


class Terminated(KeyboardInterrupt):
    """What SIGTERM and SIGHUP raise in the command line: no `SystemExit`, which plugins may raise
    too. ``number`` is the signal's."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def terminate(number: int, frame: FrameType | None) -> None:
    """The command line's handler of them, which is held back as the default one is."""
    raise Terminated(number)


_HELD = {
    signal.SIGINT: (signal.default_int_handler,),
    signal.SIGTERM: (signal.SIG_DFL, terminate),
    signal.SIGHUP: (signal.SIG_DFL, terminate),  # the terminal, or its connection, is gone
}
ENDS = tuple(_HELD)
"""The signals that end a push, once no server is left in the middle of an update."""


class Interrupts:
    """Holds signals back while servers are in the middle of an update.

    A worker that is left inside a broadcast may never answer again, so the first signal only ends
    the reading of the source: raised at once while the source's own code runs, else
    at the next `check`; when the block is left it takes effect. A second signal is not held back.
    A handler that the program has set itself is left in place: it decides. Outside the main
    thread, where Python runs no handlers, this does nothing.
    """

    def __init__(
        self, wake: Callable[[], None] = lambda: None, insist: Callable[[], None] = lambda: None
    ) -> None:
        """``wake()`` is called at the first signal: it gives up what can be given up at once.
        ``insist()`` is called at a second one: it ends what the first one waits for."""
        self._wake = wake
        self._insist = insist
        self.requested = False
        """Another thread has asked for the end of this push. Signals are not counted."""
        self.inside = False
        """Servers are in the middle of an update."""
        self._in_source = False
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if a signal is being held back, or see `check_request`."""
        if self._pending is not None:
            raise KeyboardInterrupt
        self.check_request()

    def check_request(self) -> None:
        """Raise `PushCancelled` if another thread has asked for the end of this push."""
        if self.requested:
            raise PushCancelled("the push was cancelled")

    def told(self, error: BaseException) -> BaseException:
        """``error``, or what it means if the end of the push was asked for: `PushCancelled`."""
        if not self.requested or not isinstance(error, StreamerError):
            return error
        if isinstance(error, PushCancelled):
            return error
        cancelled = PushCancelled("the push was cancelled")
        cancelled.held = error.held
        cancelled.__cause__ = error
        return cancelled

    def within(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """``payloads``, with signals let through while the source produces the next one."""
        while True:
            self._in_source = True
            try:
                payload = next(payloads, None)
            finally:
                self._in_source = False
            if payload is None:
                return
            yield payload
            del payload  # borrowed until now

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._pending = self._pending is not None, number
        if again:
            self._insist()
        else:
            self._wake()
        if again or self._in_source:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._pending, self.inside = None, True
        if threading.current_thread() is threading.main_thread():
            for number, handlers in _HELD.items():
                if signal.getsignal(number) in handlers:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.inside = False
        while self._before:
            signal.signal(*self._before.popitem())
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            signal.raise_signal(pending)
        except BaseException as ended:
            # What is raised now hides the error, which says what the servers hold.
            held = error.held if isinstance(error, StreamerError) else {}
            states = [f"{url} {state}" for url, state in held.items()]
            for note in [*states, *getattr(error, "__notes__", ())]:
                ended.add_note(note)
            raise
