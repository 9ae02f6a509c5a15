"""Memory that chunks are staged in, and the threads that fill it.

On the CPU a chunk is filled in place: readers write straight into the buffer that is broadcast. For
CUDA, readers fill pinned slots, and one thread has each copied to its place in the device buffer,
on a copy stream. The readers make no CUDA call but to wait for a slot, and the ring of slots is
small, so that it stays in the processor's cache: both decide the speed (docs/measurements.md).
Everything is allocated at the first use and kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from streamer.broadcast.fill import SLOT_SIZE, Fill, Segment, bounds, cut_regions, read
from streamer.exceptions import forget_locals
from streamer.payloads import as_bytes, as_memoryview, as_raw
from streamer.source import DeferredTensor, Payload
from streamer.trace import Trace

RING_SIZE = 256 << 20
"""Bytes of pinned memory, when the target is a CUDA device."""
BATCHED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of small tensors that can be copied many at once."""
BATCHED_SIZE = 1 << 20
"""Bytes up to which a tensor is small: its copy takes the device less time than its launch."""


def _offset(pair: tuple[torch.Tensor, int]) -> int:
    return pair[1]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are in one piece of host memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


class _Slot:
    """A piece of pinned memory. ``copied`` is passed once its last contents are on the device."""

    def __init__(self) -> None:
        self.tensor = torch.empty(SLOT_SIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.view = as_memoryview(self.tensor)
        self.copied = torch.cuda.Event(blocking=True)


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
        self._copies: queue.SimpleQueue[tuple[Fill, int, int, _Slot] | None] = queue.SimpleQueue()
        self.stream = torch.cuda.Stream(device) if self._cuda else None
        self._threads = [
            threading.Thread(target=self._read_jobs, name=f"streamer-read-{number}", daemon=True)
            for number in range(threads)
        ]
        if self._cuda:
            self._threads.append(
                threading.Thread(target=self._copy_jobs, name="streamer-copy", daemon=True)
            )
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C, or a limit: nobody else knows of those that run
            self.close()
            raise

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
        elif not self._cuda and nbytes <= BATCHED_SIZE and _is_plain(payload):
            # torch takes several times as long to begin a copy, and shares one of 64 KiB out.
            ctypes.memmove(fill.buffer.data_ptr() + offset, payload.data_ptr(), nbytes)
        else:
            raw = as_raw(payload)
            target = fill.buffer[offset : offset + nbytes].view(raw.dtype).view(raw.shape)
            target.copy_(raw, non_blocking=self._cuda)

    def is_small(self, payload: Payload) -> bool:
        """Whether `add_all` can take ``payload``."""
        return (
            isinstance(payload, torch.Tensor)
            and payload.dtype in BATCHED
            and payload.device == self.device
            and payload.nbytes <= BATCHED_SIZE
            and payload.is_contiguous()
            and not payload.is_neg()
        )

    def add_all(self, fill: Fill, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Copy many small tensors, each to its offset, with few kernels on the current stream.

        All are on `device` and contiguous, of one of `BATCHED`, and must stay as they are until the
        stream has passed.
        """
        if not self._cuda:
            base = fill.buffer.data_ptr()
            for tensor, offset in tensors:
                ctypes.memmove(base + offset, tensor.data_ptr(), tensor.nbytes)
            return
        with torch.no_grad():
            runs: list[list[torch.Tensor]] = []
            starts: list[int] = []
            dtype, end = None, -1
            for tensor, offset in sorted(tensors, key=_offset):
                # There may be very many: neighbours of one dtype are cut out of the buffer at once.
                if offset != end or tensor.dtype != dtype:
                    dtype, end = tensor.dtype, offset
                    runs.append([])
                    starts.append(offset)
                runs[-1].append(tensor.view(-1))
                end += tensor.nbytes
            for sources, start in zip(runs, starts, strict=True):
                sizes = [source.numel() for source in sources]
                nbytes = sum(sizes) * sources[0].itemsize
                whole = fill.buffer[start : start + nbytes].view(sources[0].dtype)
                torch._foreach_copy_(whole.split_with_sizes(sizes), sources)

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
        take = self._read_to_slot if self._cuda else self._read_in_place
        if self._cuda:
            # Pinning memory and waiting for an event make a context on the thread's current device.
            torch.cuda.set_device(self.device)
        while (job := self._jobs.get()) is not None:
            fill, region, guard = job
            try:
                take(fill, region, guard)
            except BaseException as error:
                forget_locals(error)  # else the error, which is in the fill, would keep the fill
                fill.end(error)
            del job, fill, region, guard

    def _read_in_place(self, fill: Fill, region: list[Segment], guard: Callable[[], None]) -> None:
        first, end = bounds(region)
        with self._trace.span("read", bytes=end - first):
            read(region, as_memoryview(fill.buffer[first:end]), guard)
        fill.end(None)

    def _read_to_slot(self, fill: Fill, region: list[Segment], guard: Callable[[], None]) -> None:
        first, end = bounds(region)
        slot = self._take_slot()
        try:
            with self._trace.span("read", bytes=end - first):
                read(region, slot.view, guard)
        except BaseException:
            self._slots.put(slot)
            raise
        self._copies.put((fill, first, end, slot))

    def _copy_jobs(self) -> None:
        """The copying thread: what was read goes to the device, and its slot to the next reader."""
        assert self.stream is not None
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.stream)
        while (copy := self._copies.get()) is not None:
            fill, first, end, slot = copy
            error: BaseException | None = None
            try:
                with self._trace.device_span("copy", "host to device"):
                    fill.buffer[first:end].copy_(slot.tensor[: end - first], non_blocking=True)
                slot.copied.record()
            except BaseException as problem:
                error = problem
            self._slots.put(slot)
            fill.end(error)
            del copy, fill, slot, error

    def _take_slot(self) -> _Slot:
        with self._slots_lock:
            grow = self._slots.empty() and self._slots_left > 0
            self._slots_left -= grow
        if not grow:
            slot = self._slots.get()
            try:
                slot.copied.synchronize()
            except BaseException:
                self._slots.put(slot)
                raise
            return slot
        try:
            return _Slot()
        except BaseException:
            with self._slots_lock:
                self._slots_left += 1
            raise

    def close(self) -> None:
        """Stop the threads and let go of the slots. Jobs still queued must be such that their guard
        stops them."""
        for _ in self._threads:
            self._jobs.put(None)
        self._copies.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        with contextlib.suppress(queue.Empty):
            while True:
                self._slots.get_nowait()
