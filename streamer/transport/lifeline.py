"""A store that the trainer hosts and our receivers watch: rendezvous, and proof of life of both.

vLLM's own engine cannot tell a slow trainer from a dead one; a worker inside a broadcast then spins
for ever. Our receivers join the trainer's `torch.distributed.TCPStore` first and ask it for a key
every second. The store answers from a C++ thread of the trainer's, whatever Python is doing; when
the trainer is killed the connection breaks, and when it is stopped, or its host is gone, the answer
does not come: either way the receiver knows within seconds and aborts its transport.

The other way round the trainer calls the roll before it changes anything: a worker that is gone, or
has left, does not answer. Its answer comes from a thread that waits for nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamer import descriptors
from streamer.exceptions import DeadlineExceeded, TransportError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A trainer whose store does not answer for this long counts as dead."""

_CHECK_SECONDS = 0.5
_FIRST_SECONDS = 1.0
"""How long a worker's first attempt to connect may take before it tries again."""
_NAMED = 8
"""So many ranks are named in an error."""
_NO_CALL_SECONDS = 10 * 24 * 3600.0
"""A worker that is not called for so long answers no more: the trainer has it join anew."""

_ALIVE, _YES = "streamer/alive", b"yes"
_END = "end"
"""Written by a worker in place of a roll call, to wake what waits for one."""
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
        self,
        store: TCPStore,
        local_address: str,
        port: int,
        *,
        beats: TCPStore | None = None,
        calls: TCPStore | None = None,
    ) -> None:
        self.store = store
        self.local_address = local_address
        self.port = port
        # A store's client serves one question at a time, and a rendezvous may wait for long.
        self._beats = beats
        self._calls = calls
        self._watched_for: int | None = None
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._roll = 0
        self._stop = threading.Event()
        self._answered = threading.Event()

    @classmethod
    def host(cls, address: str, port: int = 0) -> Lifeline:
        """The trainer's end, on ``address`` and a free port unless one is given.

        Raises `TransportError` naming the address and port if it cannot listen there, or because
        too few files may be open.
        """
        descriptors.check_room(descriptors.STORE, "a store for the workers to join")
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
        try:
            store = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=60),
                master_listen_fd=listener.detach(),
            )
            store.set(_ALIVE, _YES.decode())
        except RuntimeError as error:
            raise TransportError(
                f"cannot host a store on {address}:{port}: {_first_line(error)}; if too many files "
                f"are open, {descriptors.REMEDY}"
            ) from error
        return cls(store, address, port)

    @classmethod
    def join(cls, address: str, port: int, timeout: float) -> Lifeline:
        """A worker's end. Raises `TransportError` if the trainer does not answer in time."""
        descriptors.check_room(descriptors.STORE, "to join the trainer's store")
        try:
            with socket.create_connection((address, port), timeout=timeout) as probe:
                local = probe.getsockname()[0]
            store, beats, calls = (_answering_client(address, port, timeout) for _ in range(3))
        except (OSError, RuntimeError) as error:
            raise TransportError(
                f"the trainer does not answer at {address}:{port}: {_first_line(error)}; "
                "can this host reach it there?"
            ) from error
        return cls(store, local, port, beats=beats, calls=calls)

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
        """What worker ``rank`` has said last; empty if nothing.

        Raises `TransportError` for what no worker of ours says.
        """
        (said,) = self._values([_worker_key(rank)])
        return _report(rank, said)

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
                    f"of {world_size - 1} workers, ranks {_few(missing)} have not joined "
                    f"{self.local_address}:{self.port} within {timeout:g} s"
                )
            time.sleep(0.005)

    def call_roll(self, ranks: Sequence[int]) -> None:
        """Have workers ``ranks`` answer, now; nothing waits for it: see `absent`."""
        self._roll += 1
        keys, numbers = [_call_key(rank) for rank in ranks], [str(self._roll)] * len(ranks)
        self.store.multi_set(keys, numbers)  # type: ignore[attr-defined]

    def absent(
        self, ranks: Sequence[int], timeout: float, check: Callable[[], None]
    ) -> Sequence[int]:
        """Those of ``ranks`` that have left, or else have not answered the last call in time.

        ``check`` may raise meanwhile.
        """
        number, deadline = str(self._roll).encode(), time.monotonic() + timeout
        while True:
            answers = self._values([_answer_key(rank) for rank in ranks])
            reports = self._values([_worker_key(rank) for rank in ranks])
            pairs = zip(ranks, reports, strict=True)
            left = [rank for rank, said in pairs if _report(rank, said).get("left")]
            silent = [rank for rank, said in zip(ranks, answers, strict=True) if said != number]
            if left or not silent or time.monotonic() > deadline:
                return left or silent
            check()
            time.sleep(0.001)

    def _values(self, keys: list[str]) -> list[bytes]:
        """What is under each of ``keys``, empty where nothing is; a question for what is not there
        would wait for it."""
        if self.store.check(keys):
            return self.store.multi_get(keys)
        return [self.store.get(key) if self.store.check([key]) else b"" for key in keys]

    def watch(self, rank: int, on_death: Callable[[str], None]) -> None:
        """Answer roll calls as worker ``rank``, until the trainer stops answering.

        Then ``on_death(reason)`` is called, once, from a daemon thread, and the trainer, if it was
        only stopped, finds that this worker has left.

        A question to a stopped process has no timeout of its own, so one thread asks and another
        listens for the silence.
        """
        host, answered, reports = self.store.host, self._answered, self.store
        store, calls = self._beats, self._calls
        assert store is not None, "only a worker watches"
        assert calls is not None
        calls.set_timeout(datetime.timedelta(seconds=_NO_CALL_SECONDS))
        self._watched_for = rank
        broken, lost = threading.Event(), threading.Event()

        def answer() -> None:
            with contextlib.suppress(RuntimeError):  # the trainer is gone
                while True:
                    number = calls.get(_call_key(rank))  # waits until there is one
                    if self._stop.is_set() or lost.is_set():
                        return
                    calls.delete_key(_call_key(rank))
                    calls.set(_answer_key(rank), number.decode())

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
                lost.set()
                on_death(f"the trainer at {host}:{self.port} {how}")
                with contextlib.suppress(RuntimeError):
                    reports.set(_worker_key(rank), json.dumps({"left": True}))
                    reports.set(_call_key(rank), _END)

        for target in (ask, listen, answer):
            name = f"streamer-{target.__name__}"
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """At the exit of the interpreter: the process is aborted where a call of torch's comes back
        on a daemon thread, and finds it gone."""
        if os.getpid() != self._process:
            return  # after a fork neither the threads nor the connections are this process's
        self.close()
        for thread in self._threads:
            thread.join(BEAT_SECONDS)

    def close(self) -> None:
        """Stop watching, and drop the store; on the trainer's end the workers leave.

        They are told as well: an operation of Gloo's that hangs may keep the store alive.
        """
        if self._stop.is_set():
            return
        atexit.unregister(self._end)
        self._stop.set()
        self._answered.set()
        with contextlib.suppress(RuntimeError):
            if self._beats is None:
                self.store.set(_ALIVE, "no")
            if self._watched_for is not None:
                self.store.set(_call_key(self._watched_for), _END)
        self._beats = self._calls = None
        del self.store


_T = TypeVar("_T")


def _answering_client(address: str, port: int, timeout: float) -> TCPStore:
    """A client that has been answered once.

    Whatever its timeout, a client waits for ever for a trainer that is stopped, or whose first
    answer was lost, and for 5 s for a name server that loses a question: torch asks one for the
    trainer's name. So each attempt has a thread of its own, and twice the patience of the one
    before, up to `SILENCE_SECONDS`. It also goes on trying to reach a port that is closed: so a
    trainer that has left is asked for beside it.
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

    deadline, patience = time.monotonic() + timeout, _FIRST_SECONDS
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            return _within(min(left, patience, SILENCE_SECONDS), ask, check)
        except TimeoutError:
            patience *= 2
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


def _report(rank: int, said: bytes) -> dict[str, Any]:
    """The object that worker ``rank`` has written, empty if it has written nothing."""
    try:
        value = json.loads(said or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TransportError(
            f"rank {rank} has reported {said!r:.60}, which no worker of ours does: install this "
            "version of streamer beside its server"
        )
    return value


def _few(ranks: Sequence[int]) -> str:
    """``[1, 2]``; ``[1, 2, 3, 4, 5, 6, 7, 8] and 92 more``."""
    more = len(ranks) - _NAMED
    return f"{list(ranks[:_NAMED])}" + (f" and {more} more" if more > 0 else "")


def _worker_key(rank: int) -> str:
    return f"streamer/worker/{rank}"


def _call_key(rank: int) -> str:
    return f"streamer/call/{rank}"


def _answer_key(rank: int) -> str:
    return f"streamer/answer/{rank}"
