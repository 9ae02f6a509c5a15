"""Cut the specs into calls and chunks before any byte moves.

The rules of the wire (read from vLLM's ``packed_tensor.py`` and ``nccl_engine.py``, 0.30 to 0.33):

- Packed: tensors are appended as bytes; a chunk closes right after the tensor that makes its size
  strictly greater than the buffer size; the rest of a call goes in a last, short chunk. One uint8
  broadcast a chunk, of exactly its content: no padding, and no tensor is ever split.
- The receiver views slices of the chunk in place, so every tensor must start at a multiple of its
  item size, an empty one too.
- Per tensor: one broadcast a tensor, in the listed order.

The order of names is the sender's to choose. A chunk always holds a contiguous run of the specs,
so one open chunk is enough and a layer's tensors stay together; inside it the tensors are sorted by
item size, largest first, which aligns every one of them (every size is a multiple of its item
size). The tensor that closes the chunk must stay last, or the receiver would close it earlier;
where it would be misaligned there, the call ends before it, which closes the chunk by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from streamer.broadcast.ring import Ring
from streamer.defaults import DEFAULT_BUFFER_SIZE, DEFAULT_CALL_SIZE
from streamer.exceptions import PlanError
from streamer.source import TensorSpec

PER_TENSOR_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of tensors that is staged in one buffer.

    ``order`` is the order on the wire, as indices into ``specs``; ``offsets[i]`` is where the bytes
    of ``specs[i]`` start in the buffer. ``specs`` stays in the order of the iterator.
    """

    specs: tuple[TensorSpec, ...]
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def wire_order(self) -> Iterator[tuple[TensorSpec, int]]:
        """``(spec, offset)`` in the order on the wire."""
        for index in self.order:
            yield self.specs[index], self.offsets[index]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``/update_weights`` and the chunks that are broadcast while it is open."""

    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of weights in this call."""
        return sum(spec.nbytes for chunk in self.chunks for spec in chunk.specs)

    def wire_specs(self) -> list[TensorSpec]:
        """The specs in the order on the wire: what ``update_info`` lists."""
        return [spec for chunk in self.chunks for spec, _ in chunk.wire_order()]


@dataclass(frozen=True)
class Plan:
    """How a list of specs goes over the wire."""

    calls: tuple[Call, ...]
    packed: bool
    buffer_size: int

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks of every call."""
        return [chunk for call in self.calls for chunk in call.chunks]

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """What was planned, in the order of the iterator."""
        return [spec for chunk in self.chunks for spec in chunk.specs]

    @cached_property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.specs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of weights, without the gaps that align them in a staging buffer."""
        return sum(call.nbytes for call in self.calls)

    @cached_property
    def largest_chunk(self) -> int:
        """Bytes of the largest staging buffer that the plan needs."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    def staging_bytes(self, num_buffers: int) -> int:
        """Bytes of staging memory for at most ``num_buffers`` chunks in flight."""
        return Ring.size(self.largest_chunk, min(num_buffers, len(self.chunks)))

    @cached_property
    def broadcasts(self) -> int:
        """Number of broadcasts: one a chunk when packed, else one a tensor."""
        return len(self.chunks) if self.packed else self.tensors


def make_plan(
    specs: Sequence[TensorSpec],
    *,
    packed: bool = True,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
    call_size: int = DEFAULT_CALL_SIZE,
) -> Plan:
    """Plan ``specs``, whose sizes are in bytes. Raises `PlanError` if a name comes twice."""
    _check(specs, buffer_size)
    cut = _cut_packed if packed else _cut_per_tensor
    calls: list[Call] = []
    chunks: list[Chunk] = []
    size = 0
    for chunk, ends_call in cut(specs, buffer_size):
        chunks.append(chunk)
        size += chunk.nbytes
        if ends_call or size >= call_size:
            calls.append(Call(tuple(chunks)))
            chunks, size = [], 0
    if chunks:
        calls.append(Call(tuple(chunks)))
    return Plan(tuple(calls), packed, buffer_size)


def packed_boundaries(sizes: Sequence[int], buffer_size: int) -> list[int]:
    """Where the receiver closes chunks: the number of tensors up to the end of each.

    ``sizes`` are bytes in the order on the wire. It is our receiver's side of the rule, by which
    `_cut_packed` cuts as well, as it orders the tensors: a property test holds both against the
    loop of vLLM's own receiver.
    """
    ends: list[int] = []
    total = 0
    for index, size in enumerate(sizes, start=1):
        total += size
        if total > buffer_size:
            ends.append(index)
            total = 0
    if sizes and (not ends or ends[-1] != len(sizes)):
        ends.append(len(sizes))
    return ends


def _cut_packed(specs: Sequence[TensorSpec], buffer_size: int) -> Iterator[tuple[Chunk, bool]]:
    """Chunks, and whether a call must end behind each so that the receiver closes it there."""
    window: list[TensorSpec] = []
    size = 0
    for spec in specs:
        nbytes = spec.nbytes
        if size + nbytes <= buffer_size:
            window.append(spec)
            size += nbytes
            continue
        if size % spec.dtype.itemsize:
            yield _packed_chunk(window, None), True
            window, size = [spec], nbytes
            if size <= buffer_size:
                continue
            yield _packed_chunk([], spec), False
        else:
            yield _packed_chunk(window, spec), False
        window, size = [], 0
    if window:
        yield _packed_chunk(window, None), True


def _packed_chunk(window: list[TensorSpec], closing: TensorSpec | None) -> Chunk:
    """Sort ``window`` by item size; ``closing`` is the tensor that exceeds the buffer size."""
    order = sorted(range(len(window)), key=lambda index: -window[index].dtype.itemsize)
    specs = tuple(window) if closing is None else (*window, closing)
    if closing is not None:
        order.append(len(window))
    offsets = [0] * len(specs)
    position = 0
    for index in order:
        offsets[index] = position
        position += specs[index].nbytes
    return Chunk(specs, tuple(order), tuple(offsets), position)


def _cut_per_tensor(specs: Sequence[TensorSpec], buffer_size: int) -> Iterator[tuple[Chunk, bool]]:
    """Runs of tensors that share a staging buffer; each tensor is a broadcast of its own."""
    window: list[TensorSpec] = []
    offsets: list[int] = []
    position = 0
    for spec in specs:
        nbytes = spec.nbytes
        start = -(-position // PER_TENSOR_ALIGNMENT) * PER_TENSOR_ALIGNMENT
        if window and start + nbytes > buffer_size:
            yield Chunk(tuple(window), tuple(range(len(window))), tuple(offsets), position), False
            window, offsets, start = [], [], 0
        window.append(spec)
        offsets.append(start)
        position = start + nbytes
    if window:
        yield Chunk(tuple(window), tuple(range(len(window))), tuple(offsets), position), True


def _check(specs: Sequence[TensorSpec], buffer_size: int) -> None:
    if buffer_size < 1:
        raise PlanError(f"buffer size must be at least 1 byte, not {buffer_size}")
    names: set[str] = set()
    for spec in specs:
        if not _is_valid(spec):
            raise PlanError(
                f"{spec!r:.200} is no spec: streamer.TensorSpec takes a name (text, as UTF-8), a "
                "torch.dtype, and a shape, a tuple of whole numbers from 0 on"
            )
        if spec.name in names:
            raise PlanError(f"tensor {spec.name} is in the source twice: rename or exclude one")
        names.add(spec.name)


def _is_valid(spec: TensorSpec) -> bool:
    return (
        isinstance(spec, TensorSpec)
        and isinstance(spec.name, str)
        and (spec.name.isascii() or _is_utf8(spec.name))
        and isinstance(spec.dtype, torch.dtype)
        and isinstance(spec.shape, tuple)
        and all(isinstance(size, int) and size >= 0 for size in spec.shape)
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
