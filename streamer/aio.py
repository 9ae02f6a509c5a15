"""Pushes for asyncio: each on a thread of its own, cancelled as a signal would end it.

    async with streamer.aconnect("http://localhost:8000") as session:
        await session.apush(model)

What the source does runs on that thread: it must not touch the event loop. ``on_event`` of the
session is called on the loop's thread, in order, before the push returns.

When the task is cancelled, or `asyncio.timeout` ends it, what the push waits for is woken, the open
call is completed with filler, and the servers are released, or marked and left paused, as after any
failure. Only then is `asyncio.CancelledError` raised; its notes say what each server holds. A
second cancellation aborts the transport. The code of a source is not interrupted: the end waits
until it yields its next tensor, or returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Unpack

import torch

from streamer.drivers.engine import Engine
from streamer.drivers.factory import Servers, listed
from streamer.exceptions import UsageError
from streamer.options import ConnectOptions
from streamer.report import Report

if TYPE_CHECKING:
    from streamer.session import Session

_T = TypeVar("_T")
AGAIN_SECONDS = 0.1
"""Between two calls of `Session.cancel`, which wakes only what waits at that moment."""


@contextlib.asynccontextmanager
async def aconnect(to: Servers | None, **options: Unpack[ConnectOptions]) -> AsyncIterator[Session]:
    """A session for the block, joined and closed off the event loop. See `streamer.connect`.

    Engines whose methods are coroutines (vLLM's ``AsyncLLM``) run on the loop that this is awaited
    on, unless `Engine.loop` names another.
    """
    from streamer.ranks import several_ranks
    from streamer.session import Session

    loop = asyncio.get_running_loop()
    servers = None if to is None else [_on(loop, server) for server in listed(to)]
    session = Session(servers, **options)
    try:
        if to is not None and not several_ranks():
            await beside(session, session.join)
        yield session
    finally:
        # The push of another task is cancelled by this; it ends before, and `beside` refuses two.
        cancelled: asyncio.CancelledError | None = None
        while session.turn.locked():
            session.cancel()
            try:
                await asyncio.sleep(AGAIN_SECONDS)
            except asyncio.CancelledError as error:
                cancelled = error
        await beside(session, session.close)
        if cancelled is not None:
            raise cancelled


async def apush(
    source: object,
    to: Servers | None,
    *,
    weight_version: str | None = None,
    force: bool = False,
    **options: Unpack[ConnectOptions],
) -> Report:
    """`streamer.push` for asyncio: connect, send, disconnect."""
    async with aconnect(to, **options) as session:
        return await session.apush(source, weight_version=weight_version, force=force)


async def beside(session: Session, step: Callable[[], _T]) -> _T:
    """Run ``step``, which works on ``session``, on a thread; return what it returns.

    A cancellation is passed on to the session, and raised when ``step`` has ended.
    """
    loop = asyncio.get_running_loop()
    if not session.turn.acquire(blocking=False):
        raise UsageError("this session is at work already: await what it does first")
    ended: asyncio.Future[None] = loop.create_future()
    results: list[_T] = []
    failures: list[BaseException] = []
    surroundings = _surroundings()

    def run() -> None:
        try:
            with surroundings():
                results.append(step())
        except BaseException as error:
            failures.append(error)
        finally:
            session.deliver = at_once
            session.turn.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(ended.set_result, None)

    session.deliver = loop.call_soon_threadsafe
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="streamer-push", daemon=True).start()
    cancelled = await _until(ended, session.cancel)
    if cancelled is not None:
        _annotate(cancelled, failures)
        raise cancelled
    if failures:
        raise failures.pop()
    return results[0]


async def _until(
    ended: asyncio.Future[None], cancel: Callable[..., None]
) -> asyncio.CancelledError | None:
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


def at_once(call: Callable[[], None]) -> None:
    """How events are delivered where there is no event loop."""
    call()


def _on(loop: asyncio.AbstractEventLoop, server: str | Engine) -> str | Engine:
    if isinstance(server, str) or server.loop is not None:
        return server
    return replace(server, loop=loop)
