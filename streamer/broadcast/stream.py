"""The sending thread's part of a sync: it broadcasts the chunks of each call while it is open."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamer.broadcast.fill import Fill
from streamer.broadcast.handover import Handover, Staged
from streamer.exceptions import DeadlineExceeded, SourceError, StreamerError, one_line
from streamer.plan import Call, Chunk
from streamer.source import WeightSource
from streamer.trace import Trace
from streamer.transport.base import Transport

Send = Callable[[Transport, Chunk, torch.Tensor, float], None]


class ChunkStream:
    """One sync's chunks, for the sending thread, as they come through ``handover``.

    ``progress`` is the longest wait, in seconds, for the source, a read or a broadcast. What
    ``filler`` holds is sent in place of chunks that do not come; it is as large as any. On CUDA
    ``stream`` is the one that is broadcast on, and ``copies`` that of the stage.
    """

    def __init__(
        self,
        handover: Handover,
        transport: Transport,
        send: Send,
        source: WeightSource,
        *,
        filler: torch.Tensor,
        stream: torch.cuda.Stream | None,
        copies: torch.cuda.Stream | None,
        progress: float,
        trace: Trace,
    ) -> None:
        self._handover = handover
        self._transport = transport
        self._send = send
        self._progress_of = source.progress
        self._memory = filler
        self._stream = stream
        self._copies = copies
        self._progress = progress
        self._trace = trace

    @property
    def failure(self) -> BaseException | None:
        """Why the source, or whoever stopped it, failed. What was not staged goes out as filler."""
        return self._handover.failure

    def send(self, call: Call) -> None:
        """Broadcast the chunks of ``call``, which every worker is ready to receive.

        Chunks that the source did not deliver go out as filler, whatever is in the memory, because
        a worker that is left inside a broadcast never answers again. A source that does not go on
        for the progress timeout counts as failed. Raises what the transport raises.
        """
        for chunk in call.chunks:
            staged = self._wait_for(chunk)
            self._broadcast(staged)
            self._handover.mark_sent(staged)
            del staged  # it may be the source's own tensor

    def look(self) -> BaseException | None:
        """`failure`, also for a read that has failed of what is still to be sent: with neither,
        there is use in opening a call."""
        for staged in self._handover.waiting():
            self._see_reads(staged)
        return self.failure

    def _wait_for(self, chunk: Chunk) -> Staged:
        """``chunk`` as it was staged and read, or filler in its place."""

        def late() -> BaseException:
            awaited = self._handover.awaited or chunk.specs[0]
            return DeadlineExceeded(
                f"the source did not go on for {self._progress:g} s, at {awaited.name}"
            )

        self._patiently(self._handover.wait)
        staged = self._handover.next(late) or self._filler(chunk)
        with self._trace.span("wait for reads"):
            self._await_reads(staged)
        return staged

    def _patiently(self, wait: Callable[[float], bool]) -> bool:
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
            self._handover.fail(
                SourceError(
                    f"the source's progress() failed: {type(error).__name__}: {one_line(error)}"
                )
            )
            return 0

    def _filler(self, chunk: Chunk) -> Staged:
        """A chunk of whatever the memory holds."""
        return Staged(chunk, Fill(self._memory[: chunk.nbytes]), in_place=True)

    def _await_reads(self, staged: Staged) -> None:
        wait = staged.fill.wait
        if not (wait(0) if self._handover.late_reads else self._patiently(wait)):
            self._handover.late_reads = True
            what = _range(staged.chunk)
            late = f"{what}: not read within {self._progress:g} s"
            self._handover.fail(DeadlineExceeded(late))
        self._see_reads(staged)

    def _see_reads(self, staged: Staged) -> None:
        """Fail if a read of ``staged`` has."""
        error = staged.fill.error
        if error is None:
            return
        self._transport.check()
        if not isinstance(error, StreamerError):
            what = _range(staged.chunk)
            problem = SourceError(f"reading {what}: {type(error).__name__}: {one_line(error)}")
            problem.__cause__ = error
            error = problem
        self._handover.fail(error)

    def _broadcast(self, staged: Staged) -> None:
        arguments = (self._transport, staged.chunk, staged.fill.buffer, self._progress)
        with self._trace.span("broadcast", bytes=staged.chunk.nbytes):
            if self._stream is None:
                self._send(*arguments)
                return
            assert self._copies is not None
            self._stream.wait_stream(self._copies)
            if staged.copied is not None:
                self._stream.wait_event(staged.copied)
            with self._trace.device_span("broadcast", "broadcast"):
                self._send(*arguments)
            staged.passed = torch.cuda.Event()
            staged.passed.record(self._stream)


def _range(chunk: Chunk) -> str:
    """Which tensors a chunk holds."""
    first, last = chunk.specs[0].name, chunk.specs[-1].name
    return first if first == last else f"{first} to {last}"
