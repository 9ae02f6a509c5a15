"""Gloo, for workers on CPUs."""

from __future__ import annotations

import atexit
import datetime
import re
import threading
import time
from functools import partial
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Work,
)

from streamer import descriptors
from streamer.exceptions import DeadlineExceeded, TransportError
from streamer.timeouts import seconds
from streamer.transport.base import Transport
from streamer.transport.lifeline import Lifeline
from streamer.transport.store import first_line, within
from streamer.transport.worker_lifeline import WorkerLifeline

_SLICE = datetime.timedelta(seconds=0.2)
_FILES = 8
"""Descriptors Gloo opens, plus one per rank."""


class GlooTransport(Transport):
    """A rank of a `torch.distributed.ProcessGroupGloo` that meets in the lifeline's store.

    Tensors travel as bytes, so every dtype does. Gloo itself cannot cancel an operation: an aborted
    one is left to its own timeout (``operation_timeout`` seconds) and its group is destroyed by a
    daemon thread, while the caller goes on at once.
    """

    def __init__(
        self,
        lifeline: Lifeline | WorkerLifeline,
        rank: int,
        world_size: int,
        *,
        operation_timeout: float = 60.0,
    ) -> None:
        super().__init__(torch.device("cpu"), rank, world_size)
        self._lifeline = lifeline
        self._timeout = operation_timeout
        self._group: Any = None
        self._pending: Work | None = None

    def rendezvous(self) -> dict[str, Any]:
        """Nothing of its own: the lifeline's address is the rendezvous."""
        return {}

    def connect(self, timeout: float) -> None:
        self.check()
        started = time.monotonic()
        if isinstance(self._lifeline, Lifeline):
            # Gloo's constructor blocks until every rank is there, and cannot be cancelled.
            self._lifeline.wait_for_workers(self.world_size, timeout, self.check)
        timeout = max(timeout - (time.monotonic() - started), 0.001)
        waited = f"rank {self.rank} waited for {self.world_size} ranks to join over Gloo"
        late = f"{waited}: not all of them came"
        if isinstance(self._lifeline, Lifeline):
            self._group = self._enter(timeout, waited)
        else:
            # It waits for ever for a store whose trainer is stopped, which the lifeline notices.
            try:
                self._group = within(timeout, partial(self._enter, timeout, waited), self.check)
            except TimeoutError:
                raise DeadlineExceeded(f"{late} within {timeout:g} s (Gloo)") from None
        # As wide as the workers', whatever the default dtype is: another size ends the process.
        warm_up = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._finish(self._group.allreduce([warm_up]), timeout, late)

    def _enter(self, timeout: float, waited: str) -> Any:
        """A new group, once every rank is there."""
        descriptors.check_room(_FILES + self.world_size, f"Gloo for {self.world_size} ranks")
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=timeout)
        options._threads = 2
        store = PrefixStore("gloo", self._lifeline.store)
        try:
            host = self._lifeline.local_address
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            return ProcessGroupGloo(store, self.rank, self.world_size, options)
        except RuntimeError as error:
            raise TransportError(f"{waited}: {_reason(error)}") from error
        finally:
            # No traceback may keep the store alive: workers wait for it to close.
            del options, store

    def _broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        self.check()
        if self._group is None:
            raise TransportError("this rank has not joined its broadcast group yet")
        data = tensor.view(-1).view(torch.uint8)
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = datetime.timedelta(seconds=max(timeout, self._timeout))
        late = "a worker is stuck or gone: no byte moved"
        self._finish(self._group.broadcast([data], options), timeout, late)

    def _finish(self, work: Work, timeout: float, late: str) -> None:
        """Wait in slices, so that an abort or the deadline is noticed. ``work`` owns its tensor."""
        self._pending = work
        try:
            self._wait(work, timeout, late)
        finally:
            # An error that the caller keeps must not keep the group's sockets open.
            del work
        self._pending = None
        self.check()

    def _wait(self, work: Work, timeout: float, late: str) -> None:
        deadline = time.monotonic() + timeout
        problem: str | None = None
        while problem is None:
            # A wait raises alike when it times out and when the operation fails; only after
            # completion is the error the operation's own.
            completed = work.is_completed()
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if completed:
                    problem = _reason(error)
            if self.aborted:
                break
            if time.monotonic() > deadline:
                del work
                raise DeadlineExceeded(f"{late} within {seconds(timeout)} s (Gloo)")
        del work
        self.check()
        raise TransportError(
            "a worker has left the broadcast group: it ended, or another trainer has taken its "
            f"server over (Gloo: {problem})"
        )

    def _abort(self) -> None:
        """Nothing to wake: `_wait` checks every 0.2 s."""

    def close(self) -> None:
        """Destroy the group, in a daemon thread if an operation is still inside it."""
        self.abort("closed")
        # The group's destructor joins Gloo's threads. It runs here, with the last reference, unless
        # an operation is stuck: it would wait for that.
        owned: list[object] = [self._group, self._pending]
        stuck = self._pending is not None and not self._pending.is_completed()
        self._group = self._pending = None
        if stuck:
            threading.Thread(
                target=_drop_when_done, args=(owned,), name="streamer-gloo", daemon=True
            ).start()


_dropping = threading.Lock()
"""Held by daemon threads while they are inside torch, and for ever once the interpreter exits: a
torch call that returns on a daemon thread after finalization aborts the process."""
atexit.register(_dropping.acquire, timeout=5.0)  # a fork may have left it held


def _drop_when_done(owned: list[Any]) -> None:
    """Free a group once its stuck operation has ended, by its own timeout at the latest.

    Until then the thread waits in Python, not in the destructor of the group: see `_dropping`.
    """
    while owned:
        with _dropping:
            if owned[1].is_completed():
                owned.clear()
        time.sleep(0.1)


def _reason(error: Exception) -> str:
    # Gloo begins with the place in its sources, and ends with guesses and good wishes.
    return re.sub(r"^\[[^\]]*\]\s*|\.? This (may|is) .*| GLHF.*", "", first_line(error))
