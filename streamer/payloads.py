"""A payload's bytes, and how one is read and cast, be it a tensor or still elsewhere."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from streamer.source import DeferredTensor, Payload, TensorSpec

_BLOCK = 1 << 18
"""Elements that a deferred tensor is read by when it is cast."""
_STEP = 1 << 14
"""Elements that are cast at once: torch would split more over threads of its own, beside all the
readers that the broadcaster has already, and they would wait for each other."""
_SAME_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By the size of an element, a dtype that every copy kernel knows."""


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


def read_tensor(payload: Payload, spec: TensorSpec) -> torch.Tensor:
    """``payload`` as a tensor: itself, or a deferred one read into memory of its own."""
    if isinstance(payload, torch.Tensor):
        return payload
    data = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
    if spec.nbytes:
        payload.read_into(as_memoryview(data), 0, spec.nbytes)
    return data.view(spec.dtype).view(spec.shape)


def cast_payload(old: torch.dtype, new: torch.dtype, payload: Payload) -> Payload:
    """``payload``, of dtype ``old``, as ``new``: a tensor cast now, or a deferred one later."""
    return payload.to(new) if isinstance(payload, torch.Tensor) else CastTensor(payload, old, new)


@dataclass(frozen=True, slots=True)
class CastTensor(DeferredTensor):
    """A deferred tensor of dtype ``old`` that is read as ``new``, a megabyte or so at a time."""

    payload: DeferredTensor
    old: torch.dtype
    new: torch.dtype

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        """See `DeferredTensor.read_into`. Holds no more than a block of the tensor."""
        size, at = self.new.itemsize, start
        while at < stop:
            first = at // size
            end = min(first + _BLOCK, -(-stop // size))
            read = torch.empty(end - first, dtype=self.old, device="cpu")
            self.payload.read_into(
                as_memoryview(read.view(torch.uint8)),
                first * self.old.itemsize,
                end * self.old.itemsize,
            )
            cast = torch.empty(end - first, dtype=self.new, device="cpu")
            for target, values in zip(cast.split(_STEP), read.split(_STEP), strict=True):
                target.copy_(values)
            until = min(stop, end * size)
            data = as_memoryview(cast.view(torch.uint8))
            buffer[at - start : until - start] = data[at - first * size : until - first * size]
            at = until
