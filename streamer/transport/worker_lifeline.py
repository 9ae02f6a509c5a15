"""A worker's end of the lifeline: it notices within seconds that its trainer is gone."""

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

from streamer.exceptions import TransportError
from streamer.transport.lifeline import answer_key, call_key, worker_key
from streamer.transport.store import (
    ALIVE,
    SILENCE_SECONDS,
    SYNCING,
    YES,
    first_line,
    join_store,
)

BEAT_SECONDS = 1.0
"""How often a worker asks for a sign of life."""
_MISSED_BEATS = 1 + math.ceil(SILENCE_SECONDS / BEAT_SECONDS)
"""So many beats in a row without an answer are a silence of `SILENCE_SECONDS`: during the first of
them nothing has been asked yet."""
_NO_CALL_SECONDS = 10 * 24 * 3600.0
"""After this long without a call a worker stops answering, and rejoins at the next push."""
_END = "end"
"""Written by a worker in place of a roll call, to wake its thread that waits for one."""
log = logging.getLogger("streamer")


class WorkerLifeline:
    """One worker's connections to the store of its trainer.

    ``store`` is for a rendezvous, such as Gloo's, and for that alone: a client serves one request
    at a time, and a rendezvous with a trainer that is stopped does not end. ``local_address`` is
    this process's own address on the way to the trainer.
    """

    def __init__(self, clients: Sequence[TCPStore], local_address: str) -> None:
        """``clients``: four of the trainer's store."""
        self.store, self._reports, self._beats, self._calls = clients
        self.local_address = local_address
        self._trainer = f"{self.store.host}:{self.store.port}"
        self._watched_for: int | None = None
        self._count = 0  # of beats that were answered
        self._syncing = False
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._broken = threading.Event()
        self._lost = threading.Event()

    @classmethod
    def join(cls, address: str, port: int, timeout: float) -> WorkerLifeline:
        """Reach the trainer's store within ``timeout`` seconds. Raises as `join_store` does."""
        local_address, clients = join_store(address, port, timeout, 4)
        return cls(clients, local_address)

    def report(self, rank: int, **state: Any) -> None:
        """Tell the trainer ``state`` of worker ``rank`` (JSON types), in place of the last report.

        Does not wait for it to arrive: the trainer can see it a moment after this returns.
        Raises `TransportError` if the trainer is gone.
        """
        try:
            self._reports.set(worker_key(rank), json.dumps(state))
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
        self._start("listen", self._listen, self._reports, rank, on_death)
        self._start("answer", self._answer, self._calls, rank)
        atexit.register(self._end)

    def is_syncing(self) -> bool:
        """Whether the trainer is alive and in the middle of a sync, by what it answers from now on.

        Blocks for two beats, three where it does not answer. While this watches.
        """
        # The first answer from here on may be to what was asked before.
        enough, deadline = self._count + 2, time.monotonic() + 3 * BEAT_SECONDS
        while self._count < enough and time.monotonic() < deadline:
            if self._stop.is_set() or self._broken.is_set() or self._lost.is_set():
                return False
            time.sleep(0.02)
        return self._count >= enough and self._syncing

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"streamer-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _ask(self, beats: TCPStore) -> None:
        try:
            while not self._stop.wait(BEAT_SECONDS):
                alive, syncing = beats.multi_get([ALIVE, SYNCING])
                if alive != YES:
                    break
                self._syncing = syncing == YES
                self._count += 1
                self._answered.set()
        except Exception as error:
            log.debug("the lifeline broke: %s", error)
        self._broken.set()
        self._answered.set()

    def _listen(self, reports: TCPStore, rank: int, on_death: Callable[[str], None]) -> None:
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
        _tell_left(reports, rank)

    def _answer(self, calls: TCPStore, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone
            while True:
                number = calls.get(call_key(rank))  # waits until there is one
                if self._stop.is_set() or self._lost.is_set():
                    return
                calls.delete_key(call_key(rank))
                calls.set(answer_key(rank), number.decode())

    def _end(self) -> None:
        """At exit: a torch call that returns on a daemon thread after finalization aborts the
        process."""
        if os.getpid() != self._process:
            return  # after a fork neither the threads nor the connections are this process's
        self.close()
        for thread in self._threads:
            thread.join(BEAT_SECONDS)

    def close(self) -> None:
        """Tell the trainer that this worker leaves, stop watching, and disconnect. Idempotent."""
        if self._stop.is_set():
            return
        atexit.unregister(self._end)
        self._stop.set()
        self._answered.set()
        if self._watched_for is not None:
            _tell_left(self._reports, self._watched_for)
        del self.store, self._reports, self._beats, self._calls


def _tell_left(reports: TCPStore, rank: int) -> None:
    """In one message: torch writes a trace to stderr for a second one to a trainer that is gone."""
    keys, said = [worker_key(rank), call_key(rank)], [json.dumps({"left": True}), _END]
    with contextlib.suppress(RuntimeError):
        reports.multi_set(keys, said)  # type: ignore[attr-defined]
