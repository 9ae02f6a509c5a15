"""What the thread that stages chunks and the one that sends them share: nothing else is."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from streamer.broadcast.fill import Fill
from streamer.plan import Chunk
from streamer.source import TensorSpec


@dataclass
class Staged:
    """A chunk in its buffer. Whoever has it may keep a tensor of the source from being freed."""

    chunk: Chunk
    fill: Fill
    in_place: bool = False
    """The buffer is the source's own tensor."""
    copied: torch.cuda.Event | None = None
    """The pushing thread's stream has passed its copies into the buffer."""
    sent: bool = False
    passed: torch.cuda.Event | None = None
    """The broadcasts of the chunk are over. Set before `sent`."""


class Handover:
    """The chunks of one sync between two threads. Any thread may call `fail` and read the rest."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._staged: deque[Staged] = deque()
        self._in_flight: deque[Staged] = deque()
        self.sent = 0
        """Chunks that were handed to the transport so far."""
        self.failure: BaseException | None = None
        """Why the source, or whoever stopped it, failed. What was not staged goes out as filler."""
        self.over = False
        """Nothing more will be sent."""
        self.awaited: TensorSpec | None = None
        """What the source was last asked for."""
        self.late_reads = False
        """A read outlived its deadline and may still write into a buffer."""

    def fail(self, error: BaseException) -> None:
        """The source is done with: what is left of an open call goes out as filler.

        The first error counts.
        """
        with self._turn:
            self.failure = self.failure or error
            self._turn.notify_all()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What the block raises becomes the failure."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    # For the thread that stages.

    def offer(self, staged: Staged) -> bool:
        """Hand ``staged`` over; False if there is no use in going on."""
        with self._turn:
            if self._stopped:
                return False
            self._staged.append(staged)
            self._turn.notify_all()
            return True

    def wait_until_sent(self, staged: Staged) -> None:
        """Or until nothing more will be sent."""
        with self._turn:
            self._turn.wait_for(lambda: staged.sent or self.over)

    def oldest(self) -> Staged | None:
        """The chunk whose buffer was taken first, once it was sent; with that it is let go of.

        None if there is no use in going on.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._oldest_sent or self._stopped)
            return None if self._stopped else self._in_flight.popleft()

    @property
    def _oldest_sent(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].sent

    @property
    def _stopped(self) -> bool:
        return self.over or self.failure is not None

    # For the thread that sends.

    def waiting(self) -> list[Staged]:
        """What was offered and not yet taken."""
        with self._turn:
            return list(self._staged)

    def wait(self, timeout: float) -> bool:
        """Whether a chunk is there, or none will come, within ``timeout`` seconds."""
        with self._turn:
            return self._turn.wait_for(
                lambda: bool(self._staged) or self.failure is not None, timeout
            )

    def next(self, late: Callable[[], BaseException]) -> Staged | None:
        """The next chunk. None if there is none: then none will come, because the source has
        failed, with ``late()`` if it had not before."""
        with self._turn:
            if not self._staged:
                if self.failure is None:
                    self.fail(late())
                return None
            staged = self._staged.popleft()
            if not staged.in_place:
                self._in_flight.append(staged)
            return staged

    def mark_sent(self, staged: Staged) -> None:
        """The transport has ``staged``."""
        with self._turn:
            staged.sent = True
            self.sent += 1
            self._turn.notify_all()

    def end(self) -> None:
        """Nothing more will be sent, whether all was or not. Wakes the thread that stages."""
        with self._turn:
            self.over = True
            self._turn.notify_all()
