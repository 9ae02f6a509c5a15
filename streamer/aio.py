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
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Unpack

from streamer.drivers.engine import Engine
from streamer.drivers.factory import Servers, listed
from streamer.options import ConnectOptions
from streamer.ranks import several_ranks
from streamer.report import Report
from streamer.session import Session


@contextlib.asynccontextmanager
async def aconnect(to: Servers | None, **options: Unpack[ConnectOptions]) -> AsyncIterator[Session]:
    """A session for the block, joined and closed off the event loop. See `streamer.connect`.

    Engines whose methods are coroutines (vLLM's ``AsyncLLM``) run on the loop that this is awaited
    on, unless `Engine.loop` names another.
    """
    loop = asyncio.get_running_loop()
    servers = None if to is None else [_on(loop, server) for server in listed(to)]
    session = Session(servers, **options)
    try:
        if to is not None and not several_ranks():
            await session.ajoin()
        yield session
    finally:
        await session.aclose()


async def apush(
    source: object,
    to: Servers | None,
    *,
    weight_version: str | None = None,
    force: bool = False,
    **options: Unpack[ConnectOptions],
) -> Report:
    """`streamer.push` for asyncio: connect, send, disconnect."""
    try:
        async with aconnect(to, **options) as session:
            return await session.apush(source, weight_version=weight_version, force=force)
    finally:
        del source  # an error keeps this frame


def _on(loop: asyncio.AbstractEventLoop, server: str | Engine) -> str | Engine:
    if isinstance(server, str) or server.loop is not None:
        return server
    return replace(server, loop=loop)
