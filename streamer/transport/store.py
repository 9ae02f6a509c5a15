"""The trainer's `torch.distributed.TCPStore`: hosting it, and joining it without hanging."""

from __future__ import annotations

import contextlib
import datetime
import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamer import descriptors
from streamer.exceptions import TransportError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SILENCE_SECONDS = 5.0
"""A trainer whose store does not answer for this long counts as dead."""
ALIVE, YES = "streamer/alive", b"yes"
"""The key that workers ask for, and its value until the trainer closes the store."""

_CHECK_SECONDS = 0.5
"""How often a worker that joins checks that the trainer's port is open; a check takes no longer."""
_FIRST_SECONDS = 1.0
"""How long a worker's first attempt to connect may take before it tries again."""
_REMEDIES = {
    errno.EADDRINUSE: "give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "give an address of this host",
}

_T = TypeVar("_T")


def host_store(address: str, port: int) -> TCPStore:
    """A store that listens on ``address`` and ``port`` (0: a free one) until it is freed.

    Raises `TransportError` naming the address and port if it cannot listen there, or because too
    few files may be open.
    """
    descriptors.check_room(descriptors.STORE, "a store for the workers to join")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections of the last session linger on its port: no reason to refuse it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"cannot listen on {address}:{port}: {error.strerror}; "
            f"{_REMEDIES.get(error.errno or 0, 'give another address or port')}"
        ) from error
    port = listener.getsockname()[1]
    try:
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        store.set(ALIVE, YES.decode())
    except RuntimeError as error:
        raise TransportError(
            f"cannot host a store on {address}:{port}: {first_line(error)}; if too many files "
            f"are open, {descriptors.REMEDY}"
        ) from error
    return store


def join_store(address: str, port: int, timeout: float, count: int) -> tuple[str, list[TCPStore]]:
    """This process's own address on the way to the trainer, and ``count`` clients of its store.

    ``timeout``, in seconds, is for all of them together, and then for each operation of a client.
    Raises `TransportError` if the trainer does not answer in time.
    """
    descriptors.check_room(descriptors.STORE, "to join the trainer's store")
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((address, port), timeout=timeout) as probe:
            local_address: str = probe.getsockname()[0]
        clients = [_answering_client(address, port, timeout, deadline) for _ in range(count)]
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"the trainer does not answer at {address}:{port}: {first_line(error)}; "
            "can this host reach it there?"
        ) from error
    return local_address, clients


def _answering_client(address: str, port: int, timeout: float, deadline: float) -> TCPStore:
    """A client that has been answered once, before ``deadline``; its operations have ``timeout``.

    Whatever its timeout, a client waits for ever for a trainer that is stopped, or whose first
    answer was lost, and for 5 s for a name server that loses a question: torch looks up the
    trainer's name. So each attempt has a thread of its own, and twice the patience of the one
    before, up to `SILENCE_SECONDS`. A client also keeps trying to reach a port that is closed, so
    whether the trainer has left is checked alongside.
    """

    def ask() -> TCPStore:
        store = TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=min(timeout, SILENCE_SECONDS)),
        )
        store.get(ALIVE)
        store.set_timeout(datetime.timedelta(seconds=timeout))
        return store

    def check() -> None:
        # Only a closed port says something: a host that does not answer may be slow.
        with contextlib.suppress(TimeoutError):
            socket.create_connection((address, port), timeout=_CHECK_SECONDS).close()

    patience = _FIRST_SECONDS
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            return _within(min(left, patience, SILENCE_SECONDS), ask, check)
        except TimeoutError:
            patience *= 2
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within {timeout:g} s") from None


def _within(timeout: float, step: Callable[[], _T], check: Callable[[], None]) -> _T:
    """Run ``step`` on a daemon thread for at most ``timeout`` seconds, while ``check`` may raise.

    Raises `TimeoutError` if it takes longer, else what ``step`` raises.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(step())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="streamer-join", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    thread.join(min(timeout, _CHECK_SECONDS))
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        check()
        thread.join(min(left, _CHECK_SECONDS))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def values(store: Store, keys: list[str]) -> list[bytes]:
    """The value of each of ``keys``, empty for one that is not set: `Store.get` would wait for it.

    Where all are set they are read at once, if the store can do that.
    """
    if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
        return store.multi_get(keys)
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def first_line(error: Exception) -> str:
    """What torch says, without the C++ stack that may follow; the error's class if nothing."""
    return str(error).partition("\n")[0] or type(error).__name__
