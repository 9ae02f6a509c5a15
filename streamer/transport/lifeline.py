"""A store that the trainer hosts and our receivers watch: rendezvous, liveness in both directions.

vLLM's own engine cannot tell a slow trainer from a dead one; a worker inside a broadcast then spins
for ever. Our receivers join the trainer's `torch.distributed.TCPStore` first and ask it for a key
every second. The store answers from a C++ thread of the trainer's, whatever Python is doing. When
the trainer is killed the connection breaks; when it is stopped, or its host is gone, no answer
comes. Either way the receiver knows within seconds and aborts its transport.

In the other direction, the trainer calls the roll before it changes anything: a worker that is
gone, or has left, does not answer. Workers answer from a thread that does nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamer.exceptions import DeadlineExceeded, TransportError
from streamer.transport.store import (
    ALIVE,
    SILENCE_SECONDS,
    YES,
    first_line,
    host_store,
    join_store,
    values,
)

BEAT_SECONDS = 1.0
"""How often a worker asks for a sign of life."""
_MISSED_BEATS = 1 + math.ceil(SILENCE_SECONDS / BEAT_SECONDS)
"""So many beats in a row without an answer are a silence of `SILENCE_SECONDS`: during the first of
them nothing has been asked yet."""
_NAMED = 8
"""How many ranks an error names."""
_NO_CALL_SECONDS = 10 * 24 * 3600.0
"""After this long without a call a worker stops answering, and rejoins at the next push."""
_END = "end"
"""Written by a worker in place of a roll call, to wake its thread that waits for one."""
log = logging.getLogger("streamer")


class Lifeline:
    """The trainer's end. Its ``store`` is also where Gloo's ranks meet.

    ``local_address`` and ``port`` are where the store listens.
    """

    def __init__(self, store: TCPStore, local_address: str) -> None:
        self.store = store
        self.local_address = local_address
        self.port: int = store.port
        self._roll = 0
        self._closed = False

    @classmethod
    def host(cls, address: str, port: int = 0) -> Lifeline:
        """On ``address``, and a free port unless one is given. Raises as `host_store` does."""
        return cls(host_store(address, port), address)

    def rendezvous(self) -> dict[str, Any]:
        """Fields of ``init_info``."""
        return {"master_address": self.local_address, "master_port": self.port}

    def reported(self, rank: int) -> dict[str, Any]:
        """The last report of worker ``rank``; empty if there is none.

        Raises `TransportError` if it is not one that a worker of ours makes.
        """
        (said,) = values(self.store, [_worker_key(rank)])
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
        """Ask workers ``ranks`` to answer, without waiting for them: see `absent`."""
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
            answers = values(self.store, [_answer_key(rank) for rank in ranks])
            reports = values(self.store, [_worker_key(rank) for rank in ranks])
            pairs = zip(ranks, reports, strict=True)
            left = [rank for rank, said in pairs if _report(rank, said).get("left")]
            silent = [rank for rank, said in zip(ranks, answers, strict=True) if said != number]
            if left or not silent or time.monotonic() > deadline:
                return left or silent
            check()
            time.sleep(0.001)

    def close(self) -> None:
        """Drop the store, so that the workers leave. Idempotent.

        They are told as well: a Gloo operation that hangs may keep the store alive.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self.store.set(ALIVE, "no")
        del self.store


class WorkerLifeline:
    """A worker's end. Its ``store`` is also where Gloo's ranks meet.

    ``local_address`` is this process's own address on the way to the trainer.
    """

    def __init__(
        self, store: TCPStore, beats: TCPStore, calls: TCPStore, local_address: str
    ) -> None:
        self.store = store
        # A client serves one request at a time, and a rendezvous may take long.
        self._beats = beats
        self._calls = calls
        self.local_address = local_address
        self._trainer = f"{store.host}:{store.port}"
        self._watched_for: int | None = None
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._broken = threading.Event()
        self._lost = threading.Event()

    @classmethod
    def join(cls, address: str, port: int, timeout: float) -> WorkerLifeline:
        """Reach the trainer's store within ``timeout`` seconds. Raises as `join_store` does."""
        local_address, (store, beats, calls) = join_store(address, port, timeout, 3)
        return cls(store, beats, calls, local_address)

    def report(self, rank: int, **state: Any) -> None:
        """Tell the trainer ``state`` of worker ``rank`` (JSON types), in place of the last report.

        Does not wait for it to arrive: the trainer can see it a moment after this returns.
        Raises `TransportError` if the trainer is gone.
        """
        try:
            self.store.set(_worker_key(rank), json.dumps(state))
        except RuntimeError as error:
            raise TransportError(
                f"the trainer at {self._trainer} is gone: {first_line(error)}"
            ) from error

    def watch(self, rank: int, on_death: Callable[[str], None]) -> None:
        """Answer roll calls as worker ``rank``, until the trainer stops answering.

        Then ``on_death(reason)`` is called, once, from a daemon thread, and the trainer, if it was
        only stopped, finds that this worker has left.

        A request to a stopped process does not time out by itself, so one thread asks and another
        listens for the silence.
        """
        self._watched_for = rank
        self._calls.set_timeout(datetime.timedelta(seconds=_NO_CALL_SECONDS))
        # Each thread has its client from here: `close` drops them, and may come first.
        self._start("ask", self._ask, self._beats)
        self._start("listen", self._listen, self.store, rank, on_death)
        self._start("answer", self._answer, self._calls, rank)
        atexit.register(self._end)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"streamer-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _ask(self, beats: TCPStore) -> None:
        try:
            while not self._stop.wait(BEAT_SECONDS) and beats.get(ALIVE) == YES:
                self._answered.set()
        except Exception as error:
            log.debug("the lifeline broke: %s", error)
        self._broken.set()
        self._answered.set()

    def _listen(self, store: TCPStore, rank: int, on_death: Callable[[str], None]) -> None:
        # Beats are counted, and no clock is read: a pause of this process, such as a debugger's, is
        # no silence of the trainer's.
        missed = 0
        while missed < _MISSED_BEATS and not self._broken.is_set():
            missed = 0 if self._answered.wait(BEAT_SECONDS) else missed + 1
            self._answered.clear()
        if self._stop.is_set():
            return
        how = "is gone" if self._broken.is_set() else f"was silent for {SILENCE_SECONDS:g} s"
        self._lost.set()
        on_death(f"the trainer at {self._trainer} {how}")
        with contextlib.suppress(RuntimeError):
            store.set(_worker_key(rank), json.dumps({"left": True}))
            store.set(_call_key(rank), _END)

    def _answer(self, calls: TCPStore, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone
            while True:
                number = calls.get(_call_key(rank))  # waits until there is one
                if self._stop.is_set() or self._lost.is_set():
                    return
                calls.delete_key(_call_key(rank))
                calls.set(_answer_key(rank), number.decode())

    def _end(self) -> None:
        """At exit: a torch call that returns on a daemon thread after finalization aborts the
        process."""
        if os.getpid() != self._process:
            return  # after a fork neither the threads nor the connections are this process's
        self.close()
        for thread in self._threads:
            thread.join(BEAT_SECONDS)

    def close(self) -> None:
        """Stop watching, and disconnect. Idempotent. The trainer is not told: see `report`."""
        if self._stop.is_set():
            return
        atexit.unregister(self._end)
        self._stop.set()
        self._answered.set()
        if self._watched_for is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(_call_key(self._watched_for), _END)
        del self.store, self._beats, self._calls


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
