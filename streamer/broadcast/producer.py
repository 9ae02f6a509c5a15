"""The pushing thread's part of a sync: it iterates the source, and stages chunk after chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from streamer.broadcast.fill import Fill
from streamer.broadcast.handover import Handover, Staged
from streamer.broadcast.ring import Ring
from streamer.broadcast.staging import Stage
from streamer.exceptions import SourceError, StreamerError
from streamer.payloads import as_bytes
from streamer.plan import Chunk, Plan
from streamer.source import Payload, TensorSpec, WeightSource
from streamer.trace import Trace
from streamer.transport.base import Transport

_TOGETHER = 256
"""Small tensors that are copied at once. So few stay so short that the garbage collector need not
walk the whole heap for them, which took a third of the time of 50,000 on CPUs."""


class Producer:
    """Stages the chunks of one sync, as far ahead as there are buffers. For the pushing thread.

    ``progress`` is the longest wait, in seconds, for a broadcast or a read that is under way.
    """

    def __init__(
        self,
        plan: Plan,
        ring: Ring,
        stage: Stage,
        handover: Handover,
        source: WeightSource,
        *,
        transport: Transport,
        progress: float,
        trace: Trace,
    ) -> None:
        self._plan = plan
        self._ring = ring
        self._stage = stage
        self._handover = handover
        self._lasting = source.lasting
        self._transport = transport
        self._device = transport.device
        self._cuda = transport.device.type == "cuda"
        self._progress = progress
        self._trace = trace
        self._reading: deque[Fill] = deque()

    def produce(
        self,
        payloads: Iterator[Payload],
        on_progress: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """Stage every chunk. Returns early if either side fails; see `Handover.failure`.

        ``check()`` is called before each chunk and stops the source if it raises; ``on_progress``
        is called after each.
        """
        with self._handover.guarded():
            for chunk in self._plan.chunks:
                check()
                if not self._stage_chunk(chunk, payloads):
                    return
                on_progress()

    def _stage_chunk(self, chunk: Chunk, payloads: Iterator[Payload]) -> bool:
        """Hand ``chunk`` over, staged; False if there is no use in going on."""
        if self._cuda and len(chunk.specs) == 1 and chunk.nbytes:
            self._handover.awaited = chunk.specs[0]
            payload = next(payloads)
            if _is_in_place(payload, self._device):
                assert isinstance(payload, torch.Tensor)
                return self._lend(chunk, payload)
            first: Iterator[Payload] = iter((payload,))
        else:
            first = payloads
        with self._trace.span("wait for a buffer"):
            buffer = self._take_buffer(chunk.nbytes)
        if buffer is None:
            return False
        staged = Staged(chunk, Fill(buffer))
        together: list[tuple[torch.Tensor, int]] = []
        with self._trace.span("stage", bytes=chunk.nbytes):
            for spec, offset in zip(chunk.specs, chunk.offsets, strict=True):
                self._handover.awaited = spec
                payload = next(first)
                if self._lasting and self._stage.is_small(payload):
                    assert isinstance(payload, torch.Tensor)
                    together.append((payload, offset))
                    if len(together) == _TOGETHER:
                        self._add_all(staged, together)
                        together.clear()
                    continue
                self._add(staged.fill, spec, payload, offset)
                del payload  # borrowed until now: the next one may need the memory
            self._add_all(staged, together)
            self._reading.append(staged.fill)
            self._stage.submit(staged.fill, self._guard)
            while self._reading and self._reading[0].wait(0):
                self._reading.popleft()
        return self._offer(staged)

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

    def _add_all(self, staged: Staged, found: list[tuple[torch.Tensor, int]]) -> None:
        try:
            self._stage.add_all(staged.fill, found)
        except Exception:
            # It does not say at which one: one by one, the culprit is named.
            placed = zip(staged.chunk.offsets, staged.chunk.specs, strict=True)
            # An empty tensor is where the next one is.
            specs = {(offset, spec.nbytes): spec for offset, spec in placed}
            for tensor, offset in found:
                self._add(staged.fill, specs[offset, tensor.nbytes], tensor, offset)

    def _lend(self, chunk: Chunk, tensor: torch.Tensor) -> bool:
        """Broadcast a borrowed device tensor where it is: wait until that is on the stream."""
        staged = Staged(chunk, Fill(as_bytes(tensor)), in_place=True)
        if not self._offer(staged):
            return False
        self._handover.wait_until_sent(staged)
        if staged.passed is None:
            return False
        torch.cuda.current_stream(tensor.device).wait_event(staged.passed)
        return True

    def _offer(self, staged: Staged) -> bool:
        if self._cuda:
            staged.copied = torch.cuda.Event()
            staged.copied.record(torch.cuda.current_stream(self._device))
        return self._handover.offer(staged)

    def _take_buffer(self, nbytes: int) -> torch.Tensor | None:
        while (buffer := self._ring.take(nbytes)) is None:
            staged = self._handover.oldest()
            if staged is None:
                return None
            if staged.passed is not None:
                self._transport.wait_event(staged.passed, self._progress)
            self._ring.give_back()
        return buffer

    def _guard(self) -> None:
        """On a reader's thread: stops reads that nobody waits for."""
        self._transport.check()
        if self._handover.over:
            raise SourceError("the sync is over")

    def drain(self) -> None:
        """Wait for reads that are under way, now that nothing more will be sent.

        The source may be closed after this, and the buffers used again, unless
        `Handover.late_reads`.
        """
        for fill in self._reading:
            if not fill.wait(0 if self._handover.late_reads else self._progress):
                self._handover.late_reads = True


def _is_in_place(payload: Payload, device: torch.device) -> bool:
    """Whether a payload's own memory can be broadcast as it is."""
    return (
        isinstance(payload, torch.Tensor)
        and payload.device == device
        and payload.is_contiguous()
        and not payload.is_conj()
        and not payload.is_neg()
    )
