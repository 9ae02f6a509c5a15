"""The comparisons that `SourceSuite` is made of. Each raises `AssertionError` with both values."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streamer.source import DeferredTensor, Payload, TensorSpec, WeightSource
from streamer.testing.recording import Recorded, first_difference, kind_of, read
from streamer.testing.usage import Making, memory_of

READERS = 4
ROUNDS = 5
PATIENCE = 30.0


def new_folder(tmp_path: Path) -> Path:
    """An empty folder below ``tmp_path``."""
    return Path(tempfile.mkdtemp(dir=tmp_path))


def in_words(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def check_spec(index: int, spec: object) -> None:
    """Whether it is a `TensorSpec` of the types that it declares."""
    assert isinstance(spec, TensorSpec), f"spec {index} is {kind_of(spec)}, not a TensorSpec"
    assert isinstance(spec.name, str), f"spec {index}: the name is {spec.name!r}, not a text"
    assert spec.name, f"spec {index}: the name is empty"
    assert isinstance(spec.dtype, torch.dtype), (
        f"{spec.name}: the dtype is {spec.dtype!r}, {kind_of(spec.dtype)}, not a torch.dtype"
    )
    sizes = spec.shape if isinstance(spec.shape, tuple) else (None,)
    assert all(type(size) is int and size >= 0 for size in sizes), (
        f"{spec.name}: the shape is {spec.shape!r}, {kind_of(spec.shape)}, "
        "not a tuple of integers from 0 on"
    )


def same_specs(ones: Sequence[TensorSpec], others: Sequence[TensorSpec], words: str) -> None:
    """``words`` has a place for each of two specs that differ."""
    for index in range(max(len(ones), len(others))):
        one, other = (some[index] if index < len(some) else "nothing" for some in (ones, others))
        assert one == other, f"tensor {index}: {words.format(one, other)}"


def same_bytes(spec: TensorSpec, one: bytes, other: bytes, words: str) -> None:
    """``words`` has a place for each of two values that differ."""
    difference = first_difference(spec, one, other)
    if difference is not None:
        place, *values = difference
        raise AssertionError(f"{spec.name}, element {place}: {words.format(*values)}")


def same_recordings(ones: Sequence[Recorded], others: Sequence[Recorded], words: str) -> None:
    """Both hold the same names, dtypes, shapes and bytes, in one order."""
    same_specs([item.spec for item in ones], [item.spec for item in others], words)
    for one, other in zip(ones, others, strict=True):
        same_bytes(one.spec, one.data, other.data, words)


def abandon(source: WeightSource, steps: int) -> None:
    """Iterate so far, then close the iterator."""
    iterator = iter(source)
    for _ in range(steps):
        pair = next(iterator, None)
    del pair
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def held_too_long(source: WeightSource) -> str | None:
    """The first tensor that ``source`` holds while it makes the next one, and drops only then.

    None if there is none, and where the iterator fails: others tell that.
    """
    iterator = iter(source)
    last: tuple[str, StorageWeakRef | None] = "", None
    while True:
        try:
            with Making(last[1]) as making:
                name, payload = next(iterator)
        except Exception:
            return None
        if making.beside and making.last is not None and making.last.expired():
            return last[0]
        last = name, memory_of(payload)
        del payload


def read_in_parts(whole: Sequence[Recorded], payloads: Sequence[Payload]) -> None:
    """Read parts of all deferred tensors on `READERS` threads at once, some from the end.

    Each part must be that of the tensor as it was read in one go.
    """
    deferred = [
        (item, payload)
        for item, payload in zip(whole, payloads, strict=True)
        if isinstance(payload, DeferredTensor)
    ]
    start = Barrier(READERS)

    def run(reader: int) -> None:
        start.wait(PATIENCE)
        for turn in range(ROUNDS):
            at = (reader + turn) % max(len(deferred), 1)
            for item, payload in deferred[at:] + deferred[:at]:
                for first, end in _parts(item.spec.nbytes)[:: 1 if reader % 2 else -1]:
                    _check_part(item, payload, first, end)

    with _switching_often(), ThreadPoolExecutor(READERS) as readers:
        for done in [readers.submit(run, reader) for reader in range(READERS)]:
            done.result()


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """All of it, and pieces of it whose ends are at no boundary of elements."""
    ends = sorted({0, min(1, nbytes), nbytes // 3, nbytes // 2 + 1, max(nbytes - 1, 0), nbytes})
    ends = [end for end in ends if end <= nbytes]
    return [(0, nbytes), *pairwise(ends)] if nbytes else []


def _check_part(item: Recorded, payload: DeferredTensor, first: int, end: int) -> None:
    name = item.spec.name
    try:
        found = read(payload, first, end)
    except Exception as error:
        raise AssertionError(
            f"{name}: bytes [{first}, {end}) of {item.spec.nbytes} cannot be read by themselves, "
            f"on another thread, after the iterator went on: {in_words(error)}"
        ) from error
    want = item.data[first:end]
    if found != want:
        at = next(i for i, pair in enumerate(zip(found, want, strict=True)) if pair[0] != pair[1])
        raise AssertionError(
            f"{name}: byte {first + at} is 0x{want[at]:02x} where all of the tensor is read, and "
            f"0x{found[at]:02x} where {READERS} threads read parts, of which one is "
            f"[{first}, {end})"
        )


@contextmanager
def _switching_often() -> Iterator[None]:
    """Python changes threads after every few instructions: a race that is there shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
