"""Rank 0's data path: the buffers, the readers and the sending thread, kept between syncs."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch

from streamer.broadcast.handover import Handover
from streamer.broadcast.producer import Producer
from streamer.broadcast.ring import Ring
from streamer.broadcast.staging import Stage
from streamer.broadcast.stream import ChunkStream
from streamer.defaults import DEFAULT_NUM_BUFFERS, DEFAULT_THREADS
from streamer.exceptions import SourceError, StreamerError, forget_locals
from streamer.plan import Chunk, Plan
from streamer.source import Payload, WeightSource
from streamer.trace import Trace
from streamer.transport.base import Transport


def send_packed(transport: Transport, chunk: Chunk, buffer: torch.Tensor, timeout: float) -> None:
    """One uint8 broadcast of the whole chunk."""
    transport.broadcast(buffer[: chunk.nbytes], timeout)


def send_per_tensor(
    transport: Transport, chunk: Chunk, buffer: torch.Tensor, timeout: float
) -> None:
    """One broadcast a tensor, in the order on the wire, each of the tensor's own dtype."""
    for spec, offset in chunk.wire_order():
        piece = buffer[offset : offset + spec.nbytes]
        transport.broadcast(piece.view(spec.dtype) if spec.nbytes else piece, timeout)


class Broadcaster:
    """Stages and broadcasts plans over one transport.

    Device memory is ``num_buffers`` times the largest chunk, which is at most the buffer size plus
    the largest tensor: so many chunks are in flight, and more where they are smaller. ``threads``
    readers fill them.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        num_buffers: int = DEFAULT_NUM_BUFFERS,
        threads: int = DEFAULT_THREADS,
        trace: Trace | None = None,
    ) -> None:
        self._transport = transport
        self._num_buffers = num_buffers
        self._trace = trace or Trace(enabled=False)
        cuda = transport.device.type == "cuda"
        self._stream = torch.cuda.Stream(transport.device) if cuda else None
        self._current: weakref.ref[Handover] | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="streamer-send", daemon=True)
        self._stage = Stage(transport.device, threads, self._trace)
        try:
            self._ring = Ring(self._stage.allocate(0))
            self._thread.start()
        except BaseException:
            self._stage.close()
            raise

    def prepare(self, plan: Plan) -> None:
        """Allocate the memory that ``plan`` needs, unless it is there already.

        Raises `StreamerError` if there is not so much.
        """
        size = plan.staging_bytes(self._num_buffers)
        if self._ring.memory.numel() < size:
            self._free()
            try:
                self._ring = Ring(self._stage.allocate(size))
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                raise StreamerError(
                    f"cannot have {size} bytes of staging memory on {self._transport.device}: "
                    f"{str(error).partition(chr(10))[0]}; give a smaller buffer_size or num_buffers"
                ) from error
            if self._stream is not None:
                self._ring.memory.record_stream(self._stream)
        self._ring.clear()

    def _free(self) -> None:
        self._ring = Ring(self._stage.allocate(0))

    def sync(
        self,
        plan: Plan,
        payloads: Iterator[Payload],
        conduct: Callable[[ChunkStream], None],
        *,
        source: WeightSource,
        progress_timeout: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Stage ``plan`` on this thread while ``conduct(stream)`` runs on the sending thread.

        ``conduct`` opens call after call on the servers and has ``stream.send(call)`` broadcast
        it; it opens none once ``stream.failure`` is set. ``payloads`` are what ``source`` yields.
        ``progress_timeout`` is the longest wait, in seconds, for the source, a read or a broadcast.
        ``on_progress(nbytes)`` is called on this thread for each chunk, with all bytes sent so far;
        ``check()`` before each chunk, and what it raises stops the source.

        Raises what ``conduct`` raises, else the failure of the source; by then nothing of this
        sync runs any more.
        """
        self.prepare(plan)
        handover = Handover()
        producer = Producer(
            plan,
            self._ring,
            self._stage,
            handover,
            source,
            transport=self._transport,
            progress=progress_timeout,
            trace=self._trace,
        )
        stream = ChunkStream(
            handover,
            self._transport,
            send_packed if plan.packed else send_per_tensor,
            source,
            filler=self._ring.memory,
            stream=self._stream,
            copies=self._stage.stream,
            progress=progress_timeout,
            trace=self._trace,
        )
        self._current = weakref.ref(handover)
        ended = threading.Event()
        failures: list[BaseException] = []
        tell = _Teller(plan, handover, on_progress)
        self._tasks.put(partial(_conduct, conduct, stream, handover, failures, ended))
        producer.produce(payloads, tell, check)
        # Every step of the sending thread has a deadline of its own. Whatever is raised here in the
        # meantime, by an observer or a handler of signals, must not leave it behind.
        while not ended.is_set():
            with handover.guarded():
                ended.wait(0.1)
                tell()
        with handover.guarded():
            tell()
        producer.drain()
        if not failures and handover.failure is None:
            with handover.guarded():
                # Only now: a source may close its files when it ends.
                next(payloads, None)
        if handover.late_reads or failures:
            self._free()
        if failures:
            if handover.failure is not None:  # nobody raises it
                forget_locals(handover.failure)
                if isinstance(handover.failure, SourceError):
                    failures[0].add_note(f"the source failed as well: {handover.failure}")
            raise failures[0]
        if handover.failure is not None:
            raise handover.failure

    def stop(self, error: BaseException) -> None:
        """From any thread: end the sync under way, if any, as if its source had so failed."""
        handover = None if self._current is None else self._current()
        if handover is not None:
            handover.fail(error)

    def _run(self) -> None:
        """The sending thread: sync after sync."""
        if self._stream is not None:
            torch.cuda.set_device(self._transport.device)
            torch.cuda.set_stream(self._stream)
        while (task := self._tasks.get()) is not None:
            task()
            del task

    def close(self) -> None:
        """Stop the threads and free the memory. A stuck transport must have been aborted before."""
        self._tasks.put(None)
        self._stage.close()
        self._free()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)


# Where an error may come through there are no closures: what they share outlives a cleared frame.


class _Teller:
    """Tells ``on_progress`` of the chunks that were sent since it was last called, one by one."""

    def __init__(self, plan: Plan, handover: Handover, on_progress: Callable[[int], None]) -> None:
        self._plan = plan
        self._handover = handover
        self._on_progress = on_progress
        self._chunks = self._nbytes = 0

    def __call__(self) -> None:
        while self._chunks < self._handover.sent:
            self._nbytes += self._plan.chunks[self._chunks].nbytes
            self._chunks += 1
            self._on_progress(self._nbytes)


def _conduct(
    conduct: Callable[[ChunkStream], None],
    stream: ChunkStream,
    handover: Handover,
    failures: list[BaseException],
    ended: threading.Event,
) -> None:
    """A sync's part on the sending thread."""
    try:
        conduct(stream)
    except BaseException as error:
        failures.append(error)
    finally:
        handover.end()
        ended.set()
