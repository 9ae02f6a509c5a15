"""Memory that chunks are staged in, and the threads that fill it.

On the CPU a chunk is filled in place: readers write straight into the buffer that is broadcast. For
CUDA, readers fill pinned slots, each of which is copied to its place in the device buffer on a copy
stream. Everything is allocated at the first use and kept.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable

import torch

from streamer.source import DeferredTensor, Payload
from streamer.trace import Trace

SLOT_SIZE = 16 << 20
"""Bytes that one read job moves, and the size of a pinned slot."""
RING_SIZE = 512 << 20
"""Bytes of pinned memory, when the target is a CUDA device."""

ReadInto = Callable[[memoryview, int, int], None]
Segment = tuple[ReadInto, int, int, int]
"""Bytes ``[start, stop)`` of a payload, and the offset in the buffer where they belong."""

_SAME_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def as_memoryview(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU uint8 tensor, writable. The tensor must outlive the view."""
    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def as_raw(tensor: torch.Tensor) -> torch.Tensor:
    """The logical values of ``tensor``, same shape and strides, as a dtype that can be copied.

    Many dtypes (fp8, fp4) have no copy kernel for odd strides; integers of the same size do.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The logical values of ``tensor`` as a flat uint8 tensor: a view if it is contiguous."""
    return as_raw(tensor).contiguous().view(-1).view(torch.uint8)


class Fill:
    """The filling of one buffer: what is to be read, and how far that is."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.segments: list[Segment] = []
        self.error: BaseException | None = None
        """What the first read that failed has raised."""
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._done.set()

    def wait(self, timeout: float) -> bool:
        """Whether every read has ended, well or not, within ``timeout`` seconds."""
        return self._done.wait(timeout)

    def begin(self, reads: int) -> None:
        """``reads`` jobs will call `end`."""
        if reads:
            self._left = reads
            self._done.clear()

    def end(self, error: BaseException | None) -> None:
        """A job is through."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._done.set()


class _Slot:
    """A piece of pinned memory. ``copied`` is passed once its last contents are on the device."""

    def __init__(self) -> None:
        self.tensor = torch.empty(SLOT_SIZE, dtype=torch.uint8, pin_memory=True)
        self.view = as_memoryview(self.tensor)
        self.copied = torch.cuda.Event()


class Stage:
    """Fills buffers on ``device`` with ``threads`` readers.

    The readers are daemons: a read that hangs for ever does not keep the process from exiting.
    """

    def __init__(self, device: torch.device, threads: int, trace: Trace) -> None:
        self.device = device
        self._trace = trace
        self._cuda = device.type == "cuda"
        self._jobs: queue.SimpleQueue[tuple[Fill, list[Segment], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._slots_left = max(RING_SIZE // SLOT_SIZE, threads + 1)
        self._slots_lock = threading.Lock()
        self.stream = torch.cuda.Stream(device) if self._cuda else None
        self._threads = [
            threading.Thread(target=self._read_jobs, name=f"streamer-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A new device buffer of ``nbytes`` bytes, made on the current stream.

        The copy stream waits for the current one: the memory may be what the trainer has just
        freed, with kernels that use it still to run. Freed, it is not used again before the copy
        stream has passed.
        """
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            buffer.record_stream(self.stream)
        return buffer

    def add(
        self, fill: Fill, payload: Payload, offset: int, nbytes: int, guard: Callable[[], None]
    ) -> None:
        """Take ``payload`` into ``fill`` at ``offset``.

        A tensor has been copied when this returns (a CUDA tensor: the copy is on the current
        stream); a deferred one is read once the fill is submitted. ``guard`` may raise to end a
        wait.
        """
        if nbytes == 0:
            return
        if isinstance(payload, DeferredTensor):
            fill.segments.append((payload.read_into, 0, nbytes, offset))
        elif self._cuda and payload.device.type != "cuda":
            self._copy_from_host(fill, as_bytes(payload).cpu(), offset, guard)
        else:
            raw = as_raw(payload)
            target = fill.buffer[offset : offset + nbytes].view(raw.dtype).view(raw.shape)
            target.copy_(raw, non_blocking=self._cuda)

    def _copy_from_host(
        self, fill: Fill, data: torch.Tensor, offset: int, guard: Callable[[], None]
    ) -> None:
        """Copy borrowed host memory through the pinned slots, and wait until it is read."""

        def read_into(view: memoryview, start: int, stop: int) -> None:
            target = (ctypes.c_char * (stop - start)).from_buffer(view)
            ctypes.memmove(target, data.data_ptr() + start, stop - start)

        alone = Fill(fill.buffer)
        alone.segments.append((read_into, 0, data.numel(), offset))
        self.submit(alone, guard)
        while not alone.wait(0.1):
            guard()
        if alone.error is not None:
            raise alone.error

    def submit(self, fill: Fill, guard: Callable[[], None]) -> None:
        """Start to read what is deferred in ``fill``.

        Neighbours in the buffer are read by one job, large payloads by several: a job moves up to
        `SLOT_SIZE` bytes. ``guard`` is called before each read, and may raise to stop the job.
        """
        regions = cut_regions(fill.segments)
        fill.begin(len(regions))
        for region in regions:
            self._jobs.put((fill, region, guard))

    def _read_jobs(self) -> None:
        """A reader: job after job."""
        if self.stream is not None:
            # Pinning memory makes a context on the thread's current device: never on a wrong one.
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.stream)
        read = self._read_to_device if self._cuda else self._read_in_place
        while (job := self._jobs.get()) is not None:
            fill, region, guard = job
            error: BaseException | None = None
            try:
                read(fill.buffer, region, guard)
            except BaseException as problem:
                error = problem
            fill.end(error)
            del job, fill, region, guard, error

    def _read_in_place(
        self, buffer: torch.Tensor, region: list[Segment], guard: Callable[[], None]
    ) -> None:
        first, end = _bounds(region)
        with self._trace.span("read", bytes=end - first):
            _read(region, as_memoryview(buffer[first:end]), guard)

    def _read_to_device(
        self, buffer: torch.Tensor, region: list[Segment], guard: Callable[[], None]
    ) -> None:
        first, end = _bounds(region)
        slot = self._take_slot()
        try:
            slot.copied.synchronize()
            with self._trace.span("read", bytes=end - first):
                _read(region, slot.view, guard)
            with self._trace.device_span("copy", "host to device"):
                buffer[first:end].copy_(slot.tensor[: end - first], non_blocking=True)
            slot.copied.record()
        finally:
            self._slots.put(slot)

    def _take_slot(self) -> _Slot:
        with self._slots_lock:
            grow = self._slots.empty() and self._slots_left > 0
            self._slots_left -= grow
        if not grow:
            return self._slots.get()
        try:
            return _Slot()
        except BaseException:
            with self._slots_lock:
                self._slots_left += 1
            raise

    def close(self) -> None:
        """Stop the readers. Jobs still queued must be such that their guard stops them."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def cut_regions(segments: list[Segment]) -> list[list[Segment]]:
    """Cut ``segments`` into runs without gaps of at most `SLOT_SIZE` bytes."""
    regions: list[list[Segment]] = []
    size, end = SLOT_SIZE, -1
    for read_into, start, stop, offset in sorted(segments, key=lambda segment: segment[3]):
        at = start
        while at < stop:
            place = offset + at - start
            if place != end or size == SLOT_SIZE:
                regions.append([])
                size = 0
            until = min(stop, at + SLOT_SIZE - size)
            regions[-1].append((read_into, at, until, place))
            size += until - at
            end = place + until - at
            at = until
    return regions


def _bounds(region: list[Segment]) -> tuple[int, int]:
    """Where a region starts and ends in its buffer."""
    _, start, stop, offset = region[-1]
    return region[0][3], offset + stop - start


def _read(region: list[Segment], view: memoryview, guard: Callable[[], None]) -> None:
    base = region[0][3]
    for read_into, start, stop, offset in region:
        guard()
        read_into(view[offset - base : offset - base + stop - start], start, stop)
