"""Sources made of tensors, and what must arrive of them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from streamer import DeferredTensor, Payload, Ranks, SourceError, TensorSpec, WeightSource


class Tensors(WeightSource):
    """Yields given pairs. ``specs`` are those of the tensors, or ``declared``.

    ``on_step(index)`` is called before each pair is yielded, on the thread that iterates.
    """

    def __init__(
        self,
        pairs: dict[str, Payload] | Sequence[tuple[str, Payload]],
        declared: Sequence[TensorSpec] | None = None,
        on_step: Callable[[int], None] = lambda index: None,
        weight_version: str | None = None,
    ) -> None:
        self.pairs = list(pairs.items()) if isinstance(pairs, dict) else list(pairs)
        self.declared = declared
        self.on_step = on_step
        self.weight_version = weight_version
        self.closed = 0

    def specs(self) -> Sequence[TensorSpec]:
        if self.declared is not None:
            return self.declared
        return [spec_of(name, payload) for name, payload in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        for index, pair in enumerate(self.pairs):
            self.on_step(index)
            yield pair

    def close(self) -> None:
        self.closed += 1


class Bytes(DeferredTensor):
    """A deferred tensor whose bytes are those of ``tensor``. ``on_read`` may sleep or raise."""

    def __init__(
        self, tensor: torch.Tensor, on_read: Callable[[int, int], None] = lambda start, stop: None
    ) -> None:
        self.tensor = tensor
        self.data = logical_bytes(tensor)
        self.on_read = on_read
        self.parts: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        assert not buffer.readonly
        assert buffer.format == "B"
        assert len(buffer) == stop - start
        self.parts.append((start, stop))
        self.threads.add(threading.current_thread().name)
        self.on_read(start, stop)
        buffer[:] = self.data[start:stop]


def spec_of(name: str, payload: Payload) -> TensorSpec:
    tensor = payload if isinstance(payload, torch.Tensor) else payload.tensor  # type: ignore[attr-defined]
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def logical_bytes(tensor: torch.Tensor) -> bytes:
    """The values of ``tensor`` row by row, found by its strides alone; no lazy conj or neg."""
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    size = tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    data = bytes(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())
    first = tensor.storage_offset()
    values = []
    for index in itertools.product(*map(range, tensor.shape)):
        at = first + sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        values.append(data[at * size : (at + 1) * size])
    return b"".join(values)


def checksums_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """What a worker of ours that holds these tensors says of them."""
    return {
        name: hashlib.sha256(logical_bytes(tensor)).hexdigest() for name, tensor in tensors.items()
    }


class Shards(WeightSource):
    """One tensor, which takes all ``ranks``. ``passes`` counts how often it was iterated."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.passes = 0

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("a", torch.float32, (2,))]

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        self.passes += 1
        yield "a", torch.zeros(2)


@pytest.fixture(scope="session")
def make_source() -> type[Tensors]:
    """`Tensors`: a source of given pairs."""
    return Tensors


@pytest.fixture(scope="session")
def deferred() -> type[Bytes]:
    """`Bytes`: a deferred tensor made of a tensor."""
    return Bytes


@pytest.fixture(scope="session")
def bytes_of() -> Callable[[torch.Tensor], bytes]:
    """`logical_bytes`: what must arrive for a tensor, told without the code under test."""
    return logical_bytes


@pytest.fixture(scope="session")
def random_tensor() -> Callable[..., torch.Tensor]:
    """A tensor of any dtype and shape, of random bytes (but 0 and 1 for bool)."""

    def make(dtype: torch.dtype, shape: Sequence[int] = (3, 4), seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = TensorSpec("", dtype, tuple(shape)).nbytes
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
        return data.view(dtype).view(tuple(shape))

    return make


@pytest.fixture(scope="session")
def weights(
    random_tensor: Callable[..., torch.Tensor],
) -> Callable[..., dict[str, torch.Tensor]]:
    """Small tensors by name, of bytes that depend on a number."""

    def make(seed: int = 0) -> dict[str, torch.Tensor]:
        return {f"t{i}": random_tensor(torch.float32, (1000,), seed + i) for i in range(20)}

    return make


@pytest.fixture(scope="session")
def source_error() -> type[SourceError]:
    """Shorthand for tests that make sources raise."""
    return SourceError
