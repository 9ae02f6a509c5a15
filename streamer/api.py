"""`connect` and `push`, with which most programs begin. For asyncio: `streamer.aio`."""

from __future__ import annotations

from typing import Unpack

from streamer.announce import announced
from streamer.drivers.factory import Servers
from streamer.options import ConnectOptions
from streamer.ranks import several_ranks
from streamer.report import Report
from streamer.session import Session


def connect(to: Servers | None, **options: Unpack[ConnectOptions]) -> Session:
    """Connect to the server at ``to``, or to several as one group, for any number of pushes.

    A server is a URL, or an engine: an object, or a handle of a Ray actor, see `Engine`.
    Asks each server what it is and has its workers join the broadcast group. Raises `ServerError`
    or `TransportError` if that fails; see `ConnectOptions`. In a trainer of several ranks this is
    left to the first push, whose source says which rank sends; ``to`` may be None on the others. A
    rank that is refused here tells no other: end the trainer, or they wait in their first push.
    """
    session = Session(to, **options)
    try:
        if to is not None and not several_ranks():
            session.join()
    except BaseException:
        session.close()
        raise
    return session


def push(
    source: object,
    to: Servers | None,
    *,
    weight_version: str | None = None,
    force: bool = False,
    **options: Unpack[ConnectOptions],
) -> Report:
    """Push ``source`` once: connect, send, disconnect. See `connect` and `Session.push`."""
    try:
        with announced(source):
            session = Session(to, **options)
        with session:
            return session.push(source, weight_version=weight_version, force=force)
    finally:
        del source  # an error keeps this frame
