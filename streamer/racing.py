"""Calls to servers beside what the transport does meanwhile: either ends the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

from streamer.callers import no_thread
from streamer.drivers.base import Driver
from streamer.exceptions import (
    DeadlineExceeded,
    ServerError,
    ServerUnreachable,
    StreamerError,
    TransportError,
)
from streamer.transport.base import Transport

ANSWER_SECONDS = 2.0
"""When the data plane breaks, how long a server is given to say why."""
Submit = Callable[[Driver, Callable[[], None]], Future[None]]
"""Runs a call to a driver's server on a thread. Never raises: a call not begun has failed."""


class Race:
    """Two sides, the servers and the transport, that are begun together and end together.

    `beside` is for the thread that uses the transport. Where it raises, the transport is dead.
    """

    def __init__(self, drivers: Sequence[Driver], submit: Submit, transport: Transport) -> None:
        self._drivers = drivers
        self._submit = submit
        self._transport = transport

    @contextlib.contextmanager
    def beside(
        self,
        what: str,
        calls: Sequence[Callable[[], None]],
        patience: float,
        untaken: float | None = None,
    ) -> Iterator[None]:
        """Run ``calls``, one a driver, beside the block: whichever side fails first ends the other.

        A call that fails aborts the transport, which ends the block; its error is the one raised.
        When the block fails, the calls get a moment to say why, and are then cancelled. After the
        block they have ``patience`` seconds to answer. Once all have answered, the block has
        ``untaken`` seconds if that is given: a server may answer without having done a thing.
        """
        through = threading.Event()
        futures: list[Future[None]] = []

        def silent() -> str:
            pairs = zip(self._drivers, futures, strict=False)
            return ", ".join(driver.url for driver, future in pairs if not future.done())

        def ended(future: Future[None]) -> None:
            if not future.cancelled() and future.exception() is not None:
                self._transport.abort(f"a server failed: {future.exception()}")

        def doubt() -> None:
            wait(futures)
            if not through.wait(untaken):
                self._transport.abort(
                    f"every server has answered {what}, but {untaken:g} s later their workers have "
                    "not taken all bytes: look for NCCL or Gloo errors in the servers' logs"
                )

        try:
            for driver, call in zip(self._drivers, calls, strict=True):
                futures.append(self._submit(driver, call))
                futures[-1].add_done_callback(ended)
            if untaken is not None:
                try:
                    threading.Thread(target=doubt, name="streamer-doubt", daemon=True).start()
                except RuntimeError as error:
                    raise no_thread(what, error) from error
            yield
            through.set()
            if wait(futures, patience).not_done:
                raise DeadlineExceeded(
                    f"the broadcast group was through, and nothing came for {patience:g} s"
                )
        except BaseException as error:
            through.set()
            self._transport.abort("the trainer gave up")
            if isinstance(error, TransportError | DeadlineExceeded):
                wait(futures, ANSWER_SECONDS)
            said, urls = _first_error(futures), silent()
            told = error
            if said is not None and isinstance(error, StreamerError):
                told = said
            elif urls and type(error) in (TransportError, DeadlineExceeded):
                told = type(error)(f"{urls} did not answer {what}: {error}")
            if not self._cancel(futures):
                told.add_note("a call to a server could not be cancelled within 5 s")
            if told is error:
                raise
            raise told from error
        said = _first_error(futures)
        if said is not None:
            raise said

    def _cancel(self, futures: Sequence[Future[None]]) -> bool:
        """End every call under way, also one that is just about to open its connection.

        False if one has not ended within 5 s.
        """
        for _ in range(50):
            for driver in self._drivers:
                driver.cancel()
            if not wait(futures, 0.1).not_done:
                return True
        return False


def _first_error(futures: Sequence[Future[None]]) -> BaseException | None:
    errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    refusals = [error for error in errors if isinstance(error, ServerError)]
    # The others say that a worker has left; the one that is gone says nothing, and is the cause.
    refusals.sort(key=lambda error: not isinstance(error, ServerUnreachable))
    return next(iter(refusals), None) or next((error for error in errors if error), None)
