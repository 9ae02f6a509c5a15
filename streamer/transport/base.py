"""What a transport is: one group, rank 0 sends, every broadcast reaches every worker."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from streamer.digest import StreamDigest
from streamer.exceptions import DeadlineExceeded, TransportError


class Transport(ABC):
    """One rank of a broadcast group. Rank 0 is the trainer, the workers follow.

    A transport is used by one thread at a time, except for `abort`, which any thread may call at
    any moment: it ends whatever `connect`, `broadcast` or `wait` is stuck in, within a second, with
    a `TransportError`; the process and its device stay usable. An aborted transport is dead.
    """

    device: torch.device
    """Where tensors must be."""
    digest: StreamDigest | None = None
    """If set, it is given every tensor that is broadcast, as sent or as received."""

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise TransportError(f"rank {rank} is not in a group of world size {world_size}")
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self._aborted = threading.Event()
        # A handler of signals may abort what the main thread is aborting already.
        self._aborting = threading.RLock()
        self._reason = "aborted"

    @abstractmethod
    def rendezvous(self) -> dict[str, Any]:
        """What the other ranks need to join: fields of ``init_info``. Asked of rank 0, once."""

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Join the group and run the warm-up all-reduce; every rank enters at once.

        Raises `DeadlineExceeded` after ``timeout`` seconds, `TransportError` if it fails.
        """

    def broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        """Send ``tensor`` if this is rank 0, else receive into it.

        ``tensor`` is contiguous and on `device`; every rank gives the same number of bytes. An
        empty tensor takes part in no collective. On CUDA the broadcast is enqueued on the current
        stream, and the tensor must stay as it is until that stream has passed it; on the CPU it
        has been sent, or received, when this returns.
        """
        if tensor.numel() == 0:
            return
        self._broadcast(tensor, timeout)
        if self.digest is not None:
            self.digest.add(tensor)

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        """`broadcast` of a tensor that is not empty."""

    def wait(self, timeout: float) -> None:
        """Block until every broadcast so far, and all else on the current stream, is complete."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.wait_event(event, timeout)
        self.check()

    def wait_event(self, event: torch.cuda.Event, timeout: float) -> None:
        """Block until ``event`` has passed, without ever handing the thread to the driver.

        `torch.cuda.Event.synchronize` cannot be interrupted; a poll can.
        """
        deadline = time.monotonic() + timeout
        pause = 20e-6
        while not event.query():
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no byte moved for {timeout:g} s: a worker is stuck or gone"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-4)

    def abort(self, reason: str = "aborted") -> None:
        """End everything this rank is stuck in. Idempotent; from any thread."""
        with self._aborting:
            if not self._aborted.is_set():
                self._reason = reason
                self._aborted.set()
                self._abort()

    def check(self) -> None:
        """Raise `TransportError` if the transport was aborted."""
        if self._aborted.is_set():
            raise TransportError(f"broadcast group: {self._reason}")

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    @abstractmethod
    def _abort(self) -> None:
        """Wake whatever is stuck. Called once."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free its memory. Never blocks; needs no peer. Idempotent."""
