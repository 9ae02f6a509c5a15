"""What a source yields, copied as it comes, and where two tensors differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from streamer.exceptions import SourceError
from streamer.payloads import as_bytes, as_memoryview
from streamer.source import DeferredTensor, TensorSpec, WeightSource, check_sendable


@dataclass(frozen=True, slots=True)
class Recorded:
    """One pair of an iterator: ``spec`` is what the payload itself says, ``data`` its bytes.

    A deferred tensor says nothing of itself: there ``spec`` is the one in ``specs()``.
    """

    spec: TensorSpec
    data: bytes
    deferred: bool

    @property
    def tensor(self) -> torch.Tensor:
        """A copy of the values."""
        return as_tensor(self.data, self.spec)


def record(source: WeightSource) -> list[Recorded]:
    """Iterate ``source`` once and copy every payload at once, as a consumer must.

    ``specs()`` is asked first, and believed only for deferred tensors.
    """
    declared = {spec.name: spec for spec in source.specs()}
    return [recorded(index, pair, declared) for index, pair in enumerate(source)]


def recorded(index: int, pair: object, declared: Mapping[str, TensorSpec]) -> Recorded:
    """Copy one pair. Raises `AssertionError` that says what it is instead, if it is none."""
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
    assert is_pair, f"tensor {index}: the iterator gave {pair!r:.100}, not a (name, payload) pair"
    assert isinstance(pair, tuple)
    name, payload = pair
    if isinstance(payload, torch.Tensor):
        try:
            check_sendable(name, payload)
        except SourceError as error:
            raise AssertionError(str(error)) from error
        spec = TensorSpec(name, payload.dtype, tuple(payload.shape))
        return Recorded(spec, bytes_of(payload), deferred=False)
    assert isinstance(payload, DeferredTensor), (
        f"{name}: the payload is {kind_of(payload)}, not a torch.Tensor or a DeferredTensor"
    )
    assert name in declared, f"{name}: the iterator gave a deferred tensor that specs() has not"
    spec = declared[name]
    return Recorded(spec, read(payload, 0, spec.nbytes), deferred=True)


def read(payload: DeferredTensor, start: int, stop: int) -> bytes:
    """Bytes ``[start, stop)``, read into memory that held something else before."""
    data = bytearray(b"\xaa" * (stop - start))
    payload.read_into(memoryview(data), start, stop)
    return bytes(data)


def bytes_of(payload: torch.Tensor) -> bytes:
    """The logical values, row by row."""
    data = as_bytes(payload).cpu()
    return bytes(as_memoryview(data)) if data.numel() else b""


def as_tensor(data: bytes, spec: TensorSpec) -> torch.Tensor:
    """The tensor whose bytes ``data`` are."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return flat.view(spec.dtype).view(spec.shape)


def first_difference(spec: TensorSpec, one: bytes, other: bytes) -> tuple[str, str, str] | None:
    """Which element differs first, and its two values: ``("[0, 2]", "1.5", "-0.0")``.

    None if all bytes are equal. What has other bytes but prints the same is told by its bytes.
    """
    if one == other:
        return None
    if len(one) != len(other):
        return "all of it", f"{len(one)} bytes", f"{len(other)} bytes"
    size = spec.dtype.itemsize
    at = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    flat = at // size
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), spec.shape)]
    pieces = [data[flat * size : flat * size + size] for data in (one, other)]
    values = [_value(piece, spec.dtype) for piece in pieces]
    if values[0] == values[1]:
        values = [f"0x{piece.hex()}" for piece in pieces]
    return str(place), values[0], values[1]


def kind_of(value: object) -> str:
    """What a value is, for a message."""
    return f"a {type(value).__name__}"


def _value(piece: bytes, dtype: torch.dtype) -> str:
    try:
        return str(as_tensor(piece, TensorSpec("", dtype, ())).item())
    except (RuntimeError, NotImplementedError):  # fp4 has two values in a byte, and no item()
        return f"0x{piece.hex()}"
