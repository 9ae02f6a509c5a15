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

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamer.exceptions import DeadlineExceeded, TransportError
from streamer.transport.store import (
    ALIVE,
    SYNCING,
    YES,
    host_store,
    let_port_go,
    values,
)

_NAMED = 8
"""How many ranks an error names."""


class Lifeline:
    """The trainer's end. Its ``store`` is also where Gloo's ranks meet.

    ``local_address`` and ``port`` are where the store listens.
    """

    def __init__(self, store: TCPStore, local_address: str) -> None:
        self._store: TCPStore | None = store
        self.local_address = local_address
        self.port: int = store.port
        self._roll = 0

    @classmethod
    def host(cls, address: str, port: int = 0) -> Lifeline:
        """On ``address``, and a free port unless one is given. Raises as `host_store` does."""
        return cls(host_store(address, port), address)

    @property
    def store(self) -> TCPStore:
        """Raises `TransportError` once this is closed, as another thread may do at any moment."""
        store = self._store
        if store is None:
            raise TransportError("broadcast group: closed")
        return store

    def rendezvous(self) -> dict[str, Any]:
        """Fields of ``init_info``."""
        return {"master_address": self.local_address, "master_port": self.port}

    def reported(self, rank: int) -> dict[str, Any]:
        """The last report of worker ``rank``; empty if there is none.

        Raises `TransportError` if it is not one that a worker of ours makes.
        """
        (said,) = values(self.store, [worker_key(rank)])
        return _report(rank, said)

    def wait_for_workers(self, world_size: int, timeout: float, check: Callable[[], None]) -> None:
        """Block until workers ``1 .. world_size - 1`` have reported; ``check`` may raise meanwhile.

        Raises `DeadlineExceeded` naming the ranks that did not come.
        """
        deadline = time.monotonic() + timeout
        missing = list(range(1, world_size))
        while True:
            missing = [rank for rank in missing if not self.store.check([worker_key(rank)])]
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
        keys, numbers = [call_key(rank) for rank in ranks], [str(self._roll)] * len(ranks)
        self.store.multi_set(keys, numbers)  # type: ignore[attr-defined]

    def left(self, ranks: Sequence[int]) -> bool:
        """Whether any of ``ranks`` has said that it has left, to join another trainer, say."""
        reports = values(self.store, [worker_key(rank) for rank in ranks])
        return any(_report(*pair).get("left") for pair in zip(ranks, reports, strict=True))

    def tell_syncing(self, syncing: bool) -> None:
        """Tell the workers whether a sync is under way: they let no other trainer in meanwhile."""
        self.store.set(SYNCING, YES.decode() if syncing else "no")

    def absent(
        self, ranks: Sequence[int], timeout: float, check: Callable[[], None]
    ) -> Sequence[int]:
        """Those of ``ranks`` that have left, or else have not answered the last call in time.

        ``check`` may raise meanwhile.
        """
        number, deadline = str(self._roll).encode(), time.monotonic() + timeout
        while True:
            answers = values(self.store, [answer_key(rank) for rank in ranks])
            reports = values(self.store, [worker_key(rank) for rank in ranks])
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
        store, self._store = self._store, None
        if store is not None:
            let_port_go(self.port)
            with contextlib.suppress(RuntimeError):
                store.set(ALIVE, "no")


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


def worker_key(rank: int) -> str:
    return f"streamer/worker/{rank}"


def call_key(rank: int) -> str:
    return f"streamer/call/{rank}"


def answer_key(rank: int) -> str:
    return f"streamer/answer/{rank}"
