"""A store that the trainer hosts and our receivers watch: rendezvous, and proof of life.

vLLM's own engine cannot tell a slow trainer from a dead one; a worker inside a broadcast then spins
for ever. Our receivers join the trainer's `torch.distributed.TCPStore` first and ask it for a key
every second. The store answers from a C++ thread of the trainer's, whatever Python is doing; when
the trainer is killed the connection breaks, and when it is stopped, or its host is gone, the answer
does not come: either way the receiver knows within seconds and aborts its transport.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamer.exceptions import DeadlineExceeded, TransportError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A trainer whose store does not answer for this long counts as dead."""

_CHECK_SECONDS = 0.5

_ALIVE, _YES = "streamer/alive", b"yes"
_REMEDIES = {
    errno.EADDRINUSE: "give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "give an address of this host",
}
log = logging.getLogger("streamer")


class Lifeline:
    """One end of the store. ``store`` serves the rendezvous of Gloo as well.

    ``local_address`` is this process's own address on the way to the other end.
    """

    def __init__(
        self, store: TCPStore, local_address: str, port: int, *, beats: TCPStore | None = None
    ) -> None:
        self.store = store
        self.local_address = local_address
        self.port = port
        # A store's client serves one question at a time, and a rendezvous may wait for long.
        self._beats = beats
        self._stop = threading.Event()
        self._answered = threading.Event()

    @classmethod
    def host(cls, address: str, port: int = 0) -> Lifeline:
        """The trainer's end, on ``address`` and a free port unless one is given.

        Raises `TransportError` naming the address and port if it cannot listen there.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # The connections of the last session linger on its port, which is no reason to refuse it.
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
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        store.set(_ALIVE, _YES.decode())
        return cls(store, address, port)

    @classmethod
    def join(cls, address: str, port: int, timeout: float) -> Lifeline:
        """A worker's end. Raises `TransportError` if the trainer does not answer in time."""
        try:
            with socket.create_connection((address, port), timeout=timeout) as probe:
                local = probe.getsockname()[0]
            store, beats = (_answering_client(address, port, timeout) for _ in range(2))
        except (OSError, RuntimeError) as error:
            raise TransportError(
                f"the trainer does not answer at {address}:{port}: {_first_line(error)}; "
                "can this host reach it there?"
            ) from error
        return cls(store, local, port, beats=beats)

    def rendezvous(self) -> dict[str, Any]:
        """Fields of ``init_info``."""
        return {"master_address": self.local_address, "master_port": self.port}

    def report(self, rank: int, **state: Any) -> None:
        """Tell the other end something about worker ``rank`` (JSON types), in place of the last.

        Nothing waits for it: it is known over there a moment after this returns.
        Raises `TransportError` if the trainer is gone.
        """
        try:
            self.store.set(_worker_key(rank), json.dumps(state))
        except RuntimeError as error:
            raise TransportError(
                f"the trainer at {self.store.host}:{self.port} is gone: {_first_line(error)}"
            ) from error

    def reported(self, rank: int) -> dict[str, Any]:
        """What worker ``rank`` has said last; empty if nothing."""
        key = _worker_key(rank)
        if not self.store.check([key]):
            return {}
        value: dict[str, Any] = json.loads(self.store.get(key))
        return value

    def wait_for_workers(self, world_size: int, timeout: float, check: Callable[[], None]) -> None:
        """Block until workers ``1 .. world_size - 1`` have reported; ``check`` may raise meanwhile.

        Raises `DeadlineExceeded` naming the ranks that did not come.
        """
        deadline = time.monotonic() + timeout
        missing = list(range(1, world_size))
        while True:
            missing = [rank for rank in missing if not self.store.check([_worker_key(rank)])]
            if not missing:
                return
            check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"of {world_size - 1} workers, ranks {missing} have not joined "
                    f"{self.local_address}:{self.port} within {timeout:g} s"
                )
            time.sleep(0.005)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death(reason)`` once, from a daemon thread, if the trainer stops answering.

        A question to a stopped process has no timeout of its own, so one thread asks and another
        listens for the silence.
        """
        host, store, answered = self.store.host, self._beats, self._answered
        assert store is not None, "only a worker watches"
        broken = threading.Event()

        def ask() -> None:
            try:
                while not self._stop.wait(BEAT_SECONDS) and store.get(_ALIVE) == _YES:
                    answered.set()
            except Exception as error:
                log.debug("the lifeline broke: %s", error)
            broken.set()
            answered.set()

        def listen() -> None:
            # Beats are counted, and no clock is read: when this process was stopped itself, that is
            # no silence of the trainer's.
            missed = 0
            while missed * BEAT_SECONDS < BEAT_SECONDS + SILENCE_SECONDS and not broken.is_set():
                missed = 0 if answered.wait(BEAT_SECONDS) else missed + 1
                answered.clear()
            if not self._stop.is_set():
                how = "is gone" if broken.is_set() else f"was silent for {SILENCE_SECONDS:g} s"
                on_death(f"the trainer at {host}:{self.port} {how}")

        for target in (ask, listen):
            threading.Thread(target=target, name=f"streamer-{target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and drop the store; on the trainer's end the workers leave.

        They are told as well: an operation of Gloo's that hangs may keep the store alive.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._answered.set()
        if self._beats is None:
            with contextlib.suppress(RuntimeError):
                self.store.set(_ALIVE, "no")
        self._beats = None
        del self.store


_T = TypeVar("_T")


def _answering_client(address: str, port: int, timeout: float) -> TCPStore:
    """A client that has been answered once.

    Whatever its timeout, a client waits for ever for a trainer that is stopped, or whose first
    answer was lost, so each attempt is given `SILENCE_SECONDS` on a thread of its own. It also goes
    on trying to reach a port that is closed: so a trainer that has left is asked for beside it.
    """

    def ask() -> TCPStore:
        store = TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=min(timeout, SILENCE_SECONDS)),
        )
        store.get(_ALIVE)
        store.set_timeout(datetime.timedelta(seconds=timeout))
        return store

    def check() -> None:
        # Only a port that is closed says something: a host that does not answer may be slow.
        with contextlib.suppress(TimeoutError):
            socket.create_connection((address, port), timeout=_CHECK_SECONDS).close()

    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            return _within(min(left, SILENCE_SECONDS), ask, check)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within {timeout:g} s") from None


def _within(timeout: float, step: Callable[[], _T], check: Callable[[], None]) -> _T:
    """Run ``step`` on a daemon thread for at most ``timeout`` seconds; ``check`` may raise by then.

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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _worker_key(rank: int) -> str:
    return f"streamer/worker/{rank}"
