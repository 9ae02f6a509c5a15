"""The receive loop: one for both modes, for every receiver of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

import torch

from streamer.exceptions import PlanError, StreamerError
from streamer.plan import MOST_BYTES, packed_boundaries
from streamer.source import TensorSpec
from streamer.transport.base import Transport

Sink = Callable[[list[tuple[str, torch.Tensor]]], None]
"""Takes the tensors of one chunk: views of the buffer that the allocator gave for it."""


def parse_update(update_info: Mapping[str, object]) -> list[TensorSpec]:
    """The specs that ``update_info`` lists. Raises `PlanError` for one that is malformed."""
    names, dtypes, shapes = (update_info.get(key) for key in ("names", "dtype_names", "shapes"))
    if not (
        isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)
    ) or not len(names) == len(dtypes) == len(shapes):
        raise PlanError("update_info needs names, dtype_names and shapes, lists of one length")
    specs: list[TensorSpec] = []
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise PlanError(f"tensor {name!r}: torch has no dtype {dtype_name!r}")
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise PlanError(f"tensor {name}: {shape!r} is not a shape")
        specs.append(TensorSpec(name, dtype, tuple(shape)))
    return specs


@dataclass(frozen=True, slots=True)
class Layout:
    """The chunks of one call: the specs of each in the order on the wire, and its bytes.

    Made once for as many syncs as have the same specs: the first chunk waits for it.
    """

    chunks: tuple[tuple[Sequence[TensorSpec], int], ...]
    packed: bool

    @classmethod
    def of(
        cls,
        specs: Sequence[TensorSpec],
        *,
        packed: bool,
        buffer_size: int,
        chunk_sizes: object = None,
    ) -> Layout:
        """``specs``, listed in the order on the wire, cut as the sender cuts them.

        ``chunk_sizes``, if the sender told them, are compared. Raises `PlanError`.
        """
        chunks = list(_chunks(specs, packed, buffer_size))
        sizes = [sum(spec.nbytes for spec in chunk) for chunk in chunks]
        if chunk_sizes is not None and (
            not isinstance(chunk_sizes, list)
            or any(type(n) is not int or n < 0 for n in chunk_sizes)
        ):
            raise PlanError(f"chunk_sizes must be a list of byte counts, not {chunk_sizes!r:.100}")
        if packed and chunk_sizes is not None and chunk_sizes != sizes:
            raise PlanError(
                f"the sender cuts {len(chunk_sizes)} chunks of {sum(chunk_sizes)} bytes, this "
                f"worker expects {len(sizes)} of {sum(sizes)} with a buffer of {buffer_size} "
                "bytes: nothing was received"
            )
        return cls(tuple(zip(chunks, sizes, strict=True)), packed)


def receive(
    transport: Transport,
    layout: Layout,
    *,
    allocate: Callable[[int], torch.Tensor],
    sink: Sink,
    timeout: float,
) -> None:
    """Receive what ``layout`` holds, and give each chunk to ``sink``.

    ``allocate(nbytes)`` gives the uint8 buffer of a chunk on the transport's device; the tensors
    given to ``sink`` are views of it, so whoever keeps them must allocate a new one each time.

    If ``sink`` raises, or a tensor starts where it cannot be viewed, the rest is still received,
    and thrown away, so that the sender and the other workers are not left hanging; then the error
    is raised. ``timeout`` is the longest wait for one broadcast, in seconds.
    """
    failure: Exception | None = None
    for chunk, size in layout.chunks:
        buffer = _allocate(allocate, chunk, size)
        transport.broadcast(buffer if layout.packed else _view(chunk[0], buffer), timeout)
        if failure is None:
            try:
                sink(list(_views(chunk, buffer)))
            except Exception as error:
                failure = error
    transport.wait(timeout)
    if failure is not None:
        if isinstance(failure, StreamerError):
            raise failure
        raise StreamerError(f"{type(failure).__name__}: {failure}") from failure


def _chunks(
    specs: Sequence[TensorSpec], packed: bool, buffer_size: int
) -> Iterator[Sequence[TensorSpec]]:
    if not packed:
        yield from ([spec] for spec in specs)
        return
    start = 0
    for end in packed_boundaries([spec.nbytes for spec in specs], buffer_size):
        yield specs[start:end]
        start = end


def _allocate(
    allocate: Callable[[int], torch.Tensor], chunk: Sequence[TensorSpec], size: int
) -> torch.Tensor:
    try:
        if size > MOST_BYTES:
            raise RuntimeError("no memory is so large")
        return allocate(size)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise StreamerError(
            f"cannot have {size} bytes for {chunk[0].name} to {chunk[-1].name}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def _views(chunk: Sequence[TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    offset = 0
    # There may be very many: neighbours of one dtype are cut out of the buffer at once.
    for dtype, neighbours in groupby(chunk, attrgetter("dtype")):
        run = list(neighbours)
        if offset % dtype.itemsize:
            raise PlanError(
                f"tensor {run[0].name} starts at byte {offset} of its chunk, which is no multiple "
                f"of the {dtype.itemsize} bytes of {run[0].dtype_name}"
            )
        end = offset + sum(spec.nbytes for spec in run)
        data = buffer[offset:end].view(dtype)
        at = data.storage_offset()
        for spec in run:
            # One view a tensor: a piece, and a view of that in its shape, take twice as long.
            yield spec.name, data.as_strided(spec.shape, _strides(spec.shape), at)
            at += math.prod(spec.shape)
        offset = end


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _view(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    return data.view(spec.dtype).view(spec.shape)
