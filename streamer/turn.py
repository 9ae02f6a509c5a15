"""Work of a session on a thread of its own, beside an event loop that awaits it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch

from streamer.exceptions import UsageError

_T = TypeVar("_T")
AGAIN_SECONDS = 0.1
"""Between two calls of ``cancel``, which wakes only what waits at that moment."""


class Cancel(Protocol):
    """`Session.cancel`."""

    def __call__(self, *, insist: bool = False) -> None: ...


class Turn:
    """One step at a time, and on which thread what it tells is delivered."""

    def __init__(self) -> None:
        self.deliver: Callable[[Callable[[], None]], object] = _at_once
        """Calls its argument: here and now, or on the loop that awaits the step under way."""
        self._taken = threading.Lock()

    async def beside(self, step: Callable[[], _T], cancel: Cancel) -> _T:
        """Run ``step`` on a thread; return what it returns, or raise what it raises.

        A cancellation is passed on to ``cancel``, a second one with ``insist``, and raised when
        ``step`` has ended, with notes of what that came to.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        results: list[_T] = []
        failures: list[BaseException] = []
        surroundings, context = _surroundings(), contextvars.copy_context()
        steps = [step]
        del step  # an error that is kept keeps this frame

        def run() -> None:
            try:
                with surroundings():
                    results.append(steps.pop()())
            except BaseException as error:
                failures.append(error)
            finally:
                self._end()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set_result, None)

        if not self._taken.acquire(blocking=False):
            raise UsageError("this session is at work already: await what it does first")
        self.deliver = loop.call_soon_threadsafe
        try:
            threading.Thread(
                target=context.run, args=(run,), name="streamer-push", daemon=True
            ).start()
        except BaseException:
            self._end()
            raise
        cancelled = await _until(ended, cancel)
        if cancelled is not None:
            _annotate(cancelled, failures)
            raise cancelled
        if failures:
            raise failures.pop()
        return results[0]

    async def last(self, step: Callable[[], _T], cancel: Cancel) -> _T:
        """`beside`, once the step of another task, which is cancelled, has ended."""
        cancelled: asyncio.CancelledError | None = None
        while self._taken.locked():
            cancel()
            try:
                await asyncio.sleep(AGAIN_SECONDS)
            except asyncio.CancelledError as error:
                cancelled = error
        result = await self.beside(step, cancel)
        if cancelled is not None:
            raise cancelled
        return result

    def _end(self) -> None:
        self.deliver = _at_once
        self._taken.release()


def _at_once(call: Callable[[], None]) -> None:
    call()


async def _until(ended: asyncio.Future[None], cancel: Cancel) -> asyncio.CancelledError | None:
    """Wait for ``ended``, come what may; passes cancellations on, and returns the first."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended], timeout=None if cancelled is None else AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                cancel()
            else:  # to abort a transport may take a moment
                threading.Thread(target=partial(cancel, insist=True), daemon=True).start()
        except BaseException:  # the loop is being closed under this task
            cancel()
            raise
        else:
            if cancelled is not None and not ended.done():
                cancel()
    return cancelled


def _annotate(cancelled: asyncio.CancelledError, failures: list[BaseException]) -> None:
    for failure in failures:
        for note in [str(failure), *getattr(failure, "__notes__", [])]:
            cancelled.add_note(note)
    if not failures:
        cancelled.add_note("it had been completed by then")


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """What is per thread and has to be there as here: the CUDA device, and its current stream."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
