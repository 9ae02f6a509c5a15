"""The chunks of one sync, on their way from the thread that pushes to the one that sends.

The pushing thread iterates the source and stages chunk after chunk, as far ahead as there are
buffers. The sending thread talks to the servers and broadcasts the chunks of each call while it is
open. Whichever fails first ends the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from streamer.broadcast.fill import Fill
from streamer.broadcast.ring import Ring
from streamer.broadcast.staging import Stage
from streamer.exceptions import DeadlineExceeded, SourceError, StreamerError, one_line
from streamer.payloads import as_bytes
from streamer.plan import Call, Chunk, Plan
from streamer.source import Payload, TensorSpec, WeightSource
from streamer.trace import Trace
from streamer.transport.base import Transport

Send = Callable[[Transport, Chunk, torch.Tensor, float], None]


@dataclass
class _Staged:
    """A chunk in its buffer."""

    chunk: Chunk
    fill: Fill
    in_place: bool = False
    """The buffer is the source's own tensor."""
    copied: torch.cuda.Event | None = None
    """The pushing thread's stream has passed its copies into the buffer."""
    sent: bool = False
    passed: torch.cuda.Event | None = None
    """The broadcasts of the chunk are over. Set before `sent`."""


class ChunkStream:
    """One sync's chunks. `produce` is for the pushing thread, the rest for the sending one."""

    def __init__(
        self,
        plan: Plan,
        ring: Ring,
        *,
        stage: Stage,
        transport: Transport,
        send: Send,
        stream: torch.cuda.Stream | None,
        progress: float,
        source: WeightSource,
        trace: Trace,
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._transport = transport
        self._send = send
        self._stream = stream
        self._progress = progress
        self._lasting = source.lasting
        self._progress_of = source.progress
        self._trace = trace
        self._turn = threading.Condition()
        self._ring = ring
        self._staged: deque[_Staged] = deque()
        self._in_flight: deque[_Staged] = deque()
        self._reading: deque[Fill] = deque()
        self._over = False
        self._awaited: TensorSpec | None = None
        self.sent = 0
        """Chunks that were handed to the transport so far."""
        self.failure: BaseException | None = None
        """Why the source, or whoever stopped it, failed. What was not staged goes out as filler."""
        self.late_reads = False
        """A read outlived its deadline and may still write into a buffer."""

    # -- the pushing thread ------------------------------------------------------------------

    def produce(
        self,
        payloads: Iterator[Payload],
        on_progress: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """Stage every chunk. Returns early if either side fails; see `failure`.

        ``check()`` is called before each chunk and stops the source if it raises; ``on_progress``
        is called after each.
        """
        try:
            for chunk in self._plan.chunks:
                check()
                if self._next_buffer(chunk, payloads) is None:
                    return
                on_progress()
        except BaseException as error:
            self.fail(error)

    def _next_buffer(self, chunk: Chunk, payloads: Iterator[Payload]) -> _Staged | None:
        """Stage ``chunk``; None if there is no use in going on."""
        if self._stream is not None and len(chunk.specs) == 1 and chunk.nbytes:
            self._awaited = chunk.specs[0]
            payload = next(payloads)
            if _is_in_place(payload, self._transport.device):
                assert isinstance(payload, torch.Tensor)
                return self._lend(chunk, payload)
            first: Iterator[Payload] = iter((payload,))
        else:
            first = payloads
        with self._trace.span("wait for a buffer"):
            buffer = self._take_buffer(chunk.nbytes)
        if buffer is None:
            return None
        staged = _Staged(chunk, Fill(buffer))
        together: list[tuple[torch.Tensor, int]] = []
        with self._trace.span("stage", bytes=chunk.nbytes):
            for spec, offset in zip(chunk.specs, chunk.offsets, strict=True):
                self._awaited = spec
                payload = next(first)
                if self._lasting and self._stage.is_small(payload):
                    assert isinstance(payload, torch.Tensor)
                    together.append((payload, offset))
                    continue
                self._add(staged.fill, spec, payload, offset)
                del payload  # borrowed until now: the next one may need the memory
            self._add_all(staged, together)
            self._reading.append(staged.fill)
            self._stage.submit(staged.fill, self._guard)
            while self._reading and self._reading[0].wait(0):
                self._reading.popleft()
        return staged if self._hand_over(staged) else None

    def _add(self, fill: Fill, spec: TensorSpec, payload: Payload, offset: int) -> None:
        try:
            self._stage.add(fill, payload, offset, spec.nbytes, self._guard)
        except StreamerError:
            raise
        except Exception as error:
            raise SourceError(
                f"tensor {spec.name} cannot be copied: {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    def _add_all(self, staged: _Staged, found: list[tuple[torch.Tensor, int]]) -> None:
        try:
            self._stage.add_all(staged.fill, found)
        except Exception:
            # It does not say at which one: one by one, the culprit is named.
            specs = dict(zip(staged.chunk.offsets, staged.chunk.specs, strict=True))
            for tensor, offset in found:
                self._add(staged.fill, specs[offset], tensor, offset)

    def _lend(self, chunk: Chunk, tensor: torch.Tensor) -> _Staged | None:
        """Broadcast a borrowed device tensor where it is: wait until that is on the stream."""
        staged = _Staged(chunk, Fill(as_bytes(tensor)), in_place=True)
        if not self._hand_over(staged):
            return None
        with self._turn:
            self._turn.wait_for(lambda: staged.sent or self._over)
        if staged.passed is None:
            return None
        torch.cuda.current_stream(tensor.device).wait_event(staged.passed)
        return staged

    def _hand_over(self, staged: _Staged) -> bool:
        if self._stream is not None:
            staged.copied = torch.cuda.Event()
            staged.copied.record(torch.cuda.current_stream(self._transport.device))
        with self._turn:
            if self._over or self.failure is not None:
                return False
            self._staged.append(staged)
            self._turn.notify_all()
            return True

    def _take_buffer(self, nbytes: int) -> torch.Tensor | None:
        while (buffer := self._ring.take(nbytes)) is None:
            with self._turn:
                self._turn.wait_for(lambda: self._oldest_sent() or self._stopped)
                if self._stopped:
                    return None
                staged = self._in_flight.popleft()
            if staged.passed is not None:
                self._transport.wait_event(staged.passed, self._progress)
            self._ring.give_back()
        return buffer

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What the block raises becomes the pushing side's failure."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def drain(self) -> None:
        """Wait for reads that are under way, now that nothing more will be sent.

        The source may be closed after this, and the buffers used again, unless `late_reads`.
        """
        for fill in self._reading:
            if not fill.wait(0 if self.late_reads else self._progress):
                self.late_reads = True

    def _oldest_sent(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].sent

    @property
    def _stopped(self) -> bool:
        return self._over or self.failure is not None

    def _guard(self) -> None:
        """Stops reads that nobody waits for."""
        self._transport.check()
        if self._over:
            raise SourceError("the sync is over")

    # -- either thread -----------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The source is done with: what is left of an open call goes out as filler."""
        with self._turn:
            self.failure = self.failure or error
            self._turn.notify_all()

    # -- the sending thread ------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Broadcast the chunks of ``call``, which every worker is ready to receive.

        Chunks that the source did not deliver go out as filler, whatever is in the memory, because
        a worker that is left inside a broadcast never answers again. A source that does not go on
        for the progress timeout counts as failed. Raises what the transport raises.
        """
        for chunk in call.chunks:
            staged = self._wait_for(chunk)
            self._broadcast(staged)
            with self._turn:
                staged.sent = True
                self.sent += 1
                self._turn.notify_all()
            del staged  # it may be the source's own tensor

    def look(self) -> BaseException | None:
        """`failure`, also for a read that has failed of what is still to be sent: with neither,
        there is use in opening a call."""
        with self._turn:
            staged = list(self._staged)
        for one in staged:
            self._see_reads(one)
        return self.failure

    def _wait_for(self, chunk: Chunk) -> _Staged:
        """``chunk`` as it was staged and read, or filler in its place."""
        with self._turn:
            there = partial(self._turn.wait_for, lambda: self._staged or self.failure is not None)
            self._patiently(there)
            if self._staged:
                staged = self._staged.popleft()
                if not staged.in_place:
                    self._in_flight.append(staged)
            else:
                awaited = self._awaited or chunk.specs[0]
                self.failure = self.failure or DeadlineExceeded(
                    f"the source did not go on for {self._progress:g} s, at {awaited.name}"
                )
                self._turn.notify_all()
                staged = self._filler(chunk)
        with self._trace.span("wait for reads"):
            self._await_reads(staged)
        return staged

    def _patiently(self, wait: Callable[[float], object]) -> bool:
        """Whether ``wait`` comes true before the source has stood still for the progress timeout.

        That is seen after at most twice the timeout.
        """
        seen = self._ask_progress()
        while not wait(self._progress):
            before, seen = seen, self._ask_progress()
            if seen == before:
                return False
        return True

    def _ask_progress(self) -> int:
        try:
            return self._progress_of()
        except Exception as error:
            # The source's failure, not the transport's: workers may be inside a broadcast.
            self.fail(
                SourceError(
                    f"the source's progress() failed: {type(error).__name__}: {one_line(error)}"
                )
            )
            return 0

    def _filler(self, chunk: Chunk) -> _Staged:
        """A chunk of whatever the memory holds."""
        return _Staged(chunk, Fill(self._ring.memory[: chunk.nbytes]), in_place=True)

    def _await_reads(self, staged: _Staged) -> None:
        wait = staged.fill.wait
        if not (wait(0) if self.late_reads else self._patiently(wait)):
            self.late_reads = True
            what = _range(staged.chunk)
            self.fail(SourceError(f"{what}: not read within {self._progress:g} s"))
        self._see_reads(staged)

    def _see_reads(self, staged: _Staged) -> None:
        """Fail if a read of ``staged`` has."""
        error = staged.fill.error
        if error is None:
            return
        self._transport.check()
        if not isinstance(error, StreamerError):
            what = _range(staged.chunk)
            error = SourceError(f"reading {what}: {type(error).__name__}: {one_line(error)}")
        self.fail(error)

    def _broadcast(self, staged: _Staged) -> None:
        arguments = (self._transport, staged.chunk, staged.fill.buffer, self._progress)
        with self._trace.span("broadcast", bytes=staged.chunk.nbytes):
            if self._stream is None:
                self._send(*arguments)
                return
            assert self._stage.stream is not None
            self._stream.wait_stream(self._stage.stream)
            if staged.copied is not None:
                self._stream.wait_event(staged.copied)
            with self._trace.device_span("broadcast", "broadcast"):
                self._send(*arguments)
            staged.passed = torch.cuda.Event()
            staged.passed.record(self._stream)

    def end(self) -> None:
        """Nothing more will be sent, whether all was or not. Wakes the pushing thread."""
        with self._turn:
            self._over = True
            self._turn.notify_all()


def _range(chunk: Chunk) -> str:
    """Which tensors a chunk holds."""
    first, last = chunk.specs[0].name, chunk.specs[-1].name
    return first if first == last else f"{first} to {last}"


def _is_in_place(payload: Payload, device: torch.device) -> bool:
    """Whether a payload's own memory can be broadcast as it is."""
    return (
        isinstance(payload, torch.Tensor)
        and payload.device == device
        and payload.is_contiguous()
        and not payload.is_conj()
        and not payload.is_neg()
    )
