"""What a source of weights is: specs that say what will come, and one iterator that brings it."""

from __future__ import annotations

import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamer.exceptions import SourceError, SpecMismatch, StreamerError, one_line
from streamer.ranks import Ranks

log = logging.getLogger("streamer")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a source will yield.

    ``name`` and ``shape`` are those of the Hugging Face checkpoint, the full shape also where the
    tensor is sharded over ranks; ``dtype`` is what is sent. A 0-d tensor has the shape ``()``.
    For ``torch.float4_e2m1fn_x2`` the shape counts bytes (two values each), as torch does.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: contiguous, row-major, no padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The bare name that goes over the wire: ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype_name}{list(self.shape)}"


class DeferredTensor(ABC):
    """A tensor whose bytes are still elsewhere: in a file, or behind a range request.

    The broadcaster pulls them straight into its own staging memory, parts of one tensor from
    several threads at once, and possibly after the iterator has moved on. It never pulls after
    the iterator has been closed.
    """

    __slots__ = ()

    @abstractmethod
    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        """Write bytes ``[start, stop)`` of the tensor (contiguous, row-major) into ``buffer``.

        ``buffer`` is writable, of format ``B``, and exactly ``stop - start`` long. Thread-safe.
        Raises `SourceError` if the bytes cannot be had; a short read is an error.
        """


Payload = torch.Tensor | DeferredTensor
"""What a source yields beside a name."""


class WeightSource(ABC):
    """A source of weights, iterated afresh for every sync.

    Iterating yields ``(name, payload)`` for exactly the names of ``specs()``, in that order. A
    payload is either

    - a `torch.Tensor` on any device with any strides, *borrowed*: valid until the next step of the
      iterator. A CUDA tensor must be ready on the current stream of the thread that iterates;
      that stream is made to wait for the copy out of it before the iterator is advanced;
    - a `DeferredTensor`.

    The consumer drops a payload before the next step, and so should the iterator (``del`` behind
    the ``yield``): a variable that still has it costs the memory of two.

    Where producing a tensor is a collective, ``ranks`` says which ranks iterate, all in the same
    order; only rank 0 of them sends.
    """

    ranks: Ranks | None = None
    """The ranks that must all push this source, if one alone cannot produce it."""

    lasting: bool = False
    """Whether the source writes over no tensor that it has yielded, as long as somebody holds it:
    then many small ones on a GPU are copied at once, where they are still there."""

    weight_version: str | None = None
    """What these weights are called on the server, if the caller does not say (a Hub commit)."""

    @abstractmethod
    def specs(self) -> Sequence[TensorSpec]:
        """Everything that will come, in iteration order.

        Moves no data, and is the same on every rank and every call.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Payload]]: ...

    def catch_up(self, stop: int | None) -> None:  # noqa: B027  (most sources have no ranks)
        """Produce and discard what other ranks will wait for, up to tensor number ``stop``.

        Called where a push fails on a source with ``ranks``, when its iterator may be closed: this
        rank still comes to every collective that it has agreed to, and that its iterator has not
        been through. None means the end of the source.
        """

    def progress(self) -> int:
        """A number that changes while bytes come in, for a source that waits for a network.

        Asked when a tensor has not come for the progress timeout: if it has changed since, the wait
        goes on. Called on any thread; must not wait and must not raise.
        """
        return 0

    def close(self) -> None:  # noqa: B027  (most sources have nothing to release)
        """Release files and connections. Called once by whoever opened the source."""


def specs_of(source: WeightSource) -> list[TensorSpec]:
    """``source.specs()``. An exception that is not one of ours becomes a `SourceError`."""
    with _blamed("specs()"):
        return list(source.specs())


def version_of(source: WeightSource) -> str | None:
    """``source.weight_version``, likewise."""
    with _blamed("weight_version"):
        return source.weight_version


def ranks_of(source: WeightSource) -> Ranks | None:
    """``source.ranks``, likewise."""
    with _blamed("ranks"):
        ranks = source.ranks
        if ranks is not None and not isinstance(ranks, Ranks):
            raise TypeError(f"None or a streamer.Ranks, not {ranks!r:.100}")
        return ranks


@contextlib.contextmanager
def _blamed(what: str) -> Iterator[None]:
    try:
        yield
    except StreamerError:
        raise
    except Exception as error:
        raise SourceError(
            f"the source's {what} failed: {type(error).__name__}: {one_line(error)}"
        ) from error


def close_source(source: WeightSource) -> None:
    """``source.close()``. What it raises is logged: the push is over by then, well or not."""
    try:
        source.close()
    except Exception:
        log.exception("the source's close() failed")


def check_sendable(what: str, tensor: torch.Tensor) -> None:
    """Raise `SourceError`, starting with ``what``, if the values of ``tensor`` cannot be copied.

    They can where its memory holds them as its dtype, shape and strides say.
    """
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if (
        plain
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and ((held := tensor.untyped_storage().nbytes()) == tensor.nbytes or held >= _end(tensor))
    ):
        return  # there may be very many
    # First: a nested tensor cannot even be asked for its shape.
    if tensor.is_nested:
        why = "is a nested tensor, of no one shape: yield its parts, from unbind()"
    elif tensor.layout != torch.strided:
        why = f"has the layout {tensor.layout}: make it dense, with to_dense()"
    elif tensor.is_quantized:
        why = f"is of {tensor.dtype}, whose memory is not its values: dequantize() it"
    elif tensor.is_meta:
        why = "is on the meta device, without values: load the model's weights first"
    elif is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        why = f"is a {kind}, whose memory is not its values: yield a plain tensor of them"
    elif plain:
        why = "has no memory any more, which sharding frees: gather it first"
    else:
        return
    raise SourceError(f"{what} {why}")


def _end(tensor: torch.Tensor) -> int:
    """Bytes that the memory of a strided tensor must have."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset() * tensor.itemsize + tensor.nbytes)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.itemsize


def checked(source: WeightSource, specs: Sequence[TensorSpec]) -> Generator[Payload, None, None]:
    """Iterate ``source`` and hold every pair against ``specs``.

    Raises `SpecMismatch` naming the first pair that differs, and `SourceError` for a tensor that
    cannot be sent (sparse, say). An exception of the source's own that is not one of ours becomes
    a `SourceError` that names the tensor it was to yield.
    """
    pairs = _named_errors(source, specs)
    for index, spec in enumerate(specs):
        pair = next(pairs, _END)
        if pair is _END:
            raise SpecMismatch(
                f"source ended after {index} of {len(specs)} tensors: next in specs() is {spec}"
            )
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise SpecMismatch(
                f"tensor {index}: the iterator gave a {type(pair).__name__}, not a (name, payload) "
                f"pair; specs() says {spec.name}"
            )
        name, payload = pair
        if name != spec.name:
            raise SpecMismatch(
                f"tensor {index}: specs() says {spec.name}, the iterator gave {name}"
            )
        if isinstance(payload, torch.Tensor):
            check_sendable(f"tensor {index} ({name})", payload)
            if payload.dtype != spec.dtype or payload.shape != spec.shape:
                raise SpecMismatch(
                    f"tensor {index}: specs() says {spec}, the iterator gave "
                    f"{TensorSpec(name, payload.dtype, tuple(payload.shape))}"
                )
        elif not isinstance(payload, DeferredTensor):
            raise SpecMismatch(
                f"tensor {index} ({name}): the payload is a {type(payload).__name__}, "
                "not a torch.Tensor or a streamer.DeferredTensor"
            )
        yield payload
        # Borrowed until now: the next one may need the memory.
        del pair, payload
    extra = next(pairs, _END)
    if extra is not _END:
        what = extra[0] if isinstance(extra, tuple) and extra else type(extra).__name__
        raise SpecMismatch(f"the iterator gave {what} after all {len(specs)} tensors of specs()")


_END = object()


def _named_errors(source: WeightSource, specs: Sequence[TensorSpec]) -> Iterator[object]:
    index = 0
    try:
        for pair in source:
            index += 1
            yield pair
            del pair
    except (StreamerError, GeneratorExit):
        raise
    except Exception as error:
        where = specs[index].name if index < len(specs) else "the end"
        raise SourceError(
            f"source failed at tensor {index} ({where}): {type(error).__name__}: {one_line(error)}"
        ) from error
