"""The header of a safetensors file: read, and checked down to the last byte of the file.

A file is 8 bytes (little-endian length of the header), the header (a JSON object of
``name: {"dtype", "shape", "data_offsets"}``) and the data, which the tensors fill without gaps.
"""

from __future__ import annotations

from typing import Any

import torch

from streamer.exceptions import SourceError
from streamer.source import TensorSpec
from streamer_safetensors.file import StoredTensor, WeightFile
from streamer_safetensors.untrusted import MAX_JSON_SIZE, likely_kind, parse_json, shown

_LENGTH_SIZE = 8
_MAX_INT = 2**63 - 1
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F4": torch.float4_e2m1fn_x2,
}
_FIELDS = {"dtype", "shape", "data_offsets"}
_WITHOUT_TORCH_DTYPE = ("F6_E2M3", "F6_E3M2")
_AGAIN = "download or save it again"


def read_header(file: WeightFile) -> list[StoredTensor]:
    """The tensors of ``file`` in the order of their bytes, which cover the data exactly.

    Reads the header only. Raises `SourceError` that names the file, and a likely cause, if
    anything about it is not as the format says.
    """
    if file.size == 0:
        raise SourceError(f"{file} is empty: its download or copy was interrupted; {_AGAIN}")
    start = file.read(0, min(file.size, 64))
    length = int.from_bytes(start[:_LENGTH_SIZE], "little")
    rest = file.size - _LENGTH_SIZE
    if rest < 0 or length > min(rest, MAX_JSON_SIZE):
        kind = likely_kind(start)
        if kind is not None:
            raise SourceError(f"{file} is no safetensors file but {kind}")
        if rest >= 0 and length > MAX_JSON_SIZE:
            raise SourceError(
                f"{file} is no safetensors file: its header would be {length} bytes long, and "
                f"{MAX_JSON_SIZE} are allowed; {_AGAIN}"
            )
        raise SourceError(
            f"{file} is truncated: it has {file.size} bytes, and its header alone needs "
            f"{_LENGTH_SIZE + length if rest >= 0 else _LENGTH_SIZE}; {_AGAIN}"
        )
    try:
        found = parse_header(file.read(_LENGTH_SIZE, length), rest - length)
    except ValueError as error:
        raise SourceError(f"{file} is not a sound safetensors file: {error}; {_AGAIN}") from error
    data = _LENGTH_SIZE + length
    return [StoredTensor(spec, file, data + begin) for begin, spec in found]


def parse_header(raw: bytes, data_size: int) -> list[tuple[int, TensorSpec]]:
    """Where each tensor starts in the ``data_size`` bytes of data, in ascending order.

    Raises `ValueError`, whose text is one line, if ``raw`` is not a sound header for them.
    """
    header = parse_json(raw)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    _check_metadata(header.pop("__metadata__", None))
    tensors = sorted(
        (_tensor(name, value) for name, value in header.items()), key=lambda found: found[:2]
    )
    position = 0
    for begin, end, spec in tensors:
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap"
            raise ValueError(
                f"tensor {shown(spec.name)} {fault}: it starts at byte {begin} of the data, "
                f"not at {position}"
            )
        position = end
    if position > data_size:
        raise ValueError(
            f"truncated: the tensors take {position} bytes of data, and the file holds {data_size} "
            "(an interrupted download or copy, or it is still being written)"
        )
    if position < data_size:
        raise ValueError(
            f"{data_size - position} bytes too many: the tensors take {position} bytes of data, "
            f"and the file holds {data_size} (something was appended to it)"
        )
    return [(begin, spec) for begin, _, spec in tensors]


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict)
        and all(_is_text(key) and _is_text(value) for key, value in metadata.items())
    ):
        raise ValueError("__metadata__ is not an object of strings")


def _tensor(name: str, value: Any) -> tuple[int, int, TensorSpec]:
    """Begin, end and spec of one entry."""
    if not _is_text(name):
        raise ValueError(f"the tensor name {shown(name)} is not valid Unicode")
    where = f"tensor {shown(name)}"
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not described by a JSON object")
    unknown = value.keys() - _FIELDS
    if unknown:
        # It might change what the bytes mean.
        raise ValueError(f"{where} has the unknown field {shown(min(unknown))}")
    dtype_name = value.get("dtype")
    dtype = _dtype(dtype_name, where)
    stored_shape = _integers(value.get("shape"), f"the shape of {where}")
    shape = stored_shape
    if dtype == torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise ValueError(
                f"{where}: F4{shown(stored_shape)} has no even last dimension, and torch keeps two "
                "of these values in a byte"
            )
        shape = [*shape[:-1], shape[-1] // 2]
    offsets = _integers(value.get("data_offsets"), f"the data_offsets of {where}")
    if len(offsets) != 2:
        raise ValueError(f"{where} has {len(offsets)} data_offsets, not 2")
    begin, end = offsets
    nbytes = _count(shape, where) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(
            f"{where}: {dtype_name}{shown(stored_shape)} takes {nbytes} bytes, and its "
            f"data_offsets [{begin}, {end}] span {end - begin}"
        )
    return begin, end, TensorSpec(name, dtype, tuple(shape))


def _dtype(name: Any, where: str) -> torch.dtype:
    if not isinstance(name, str):
        raise ValueError(f"{where} has no dtype")
    if name in _WITHOUT_TORCH_DTYPE:
        raise ValueError(f"{where} is {name}, a 6-bit float that torch has no dtype for")
    if name not in _DTYPES:
        raise ValueError(f"{where} has the unknown dtype {shown(name)}")
    return _DTYPES[name]


def _integers(value: Any, what: str) -> list[int]:
    numbers: list[Any] = value if isinstance(value, list) else [None]
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MAX_INT:
            raise ValueError(f"{what} is not a list of integers from 0 to {_MAX_INT}")
    return numbers


def _count(shape: list[int], where: str) -> int:
    """Number of elements; refused while it is small, for a product of many big ones takes hours."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_INT:
            raise ValueError(f"{where} has a shape of more than {_MAX_INT} elements")
    return count


def _is_text(value: Any) -> bool:
    """Whether ``value`` is a string without lone surrogates, which JSON can smuggle in."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
