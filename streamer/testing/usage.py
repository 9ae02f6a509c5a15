"""What a piece of code leaves open, and how much data it moves."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

PATIENCE = 5.0
"""Seconds that a thread which was told to stop may take."""
_FILES = Path("/proc/self/fd")
_IO = Path("/proc/self/io")


@dataclass
class Moved:
    """Bytes that were read from files (Linux), and made in memory, by Python, NumPy or torch."""

    read: int = 0
    made: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.read + self.made


@contextlib.contextmanager
def watch() -> Iterator[Moved]:
    """Measure what the block moves. Memory that is mapped and not touched does not count."""
    moved = Moved()
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    before = _bytes_read()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    try:
        with _Tensors() as tensors:
            yield moved
    finally:
        _, peak = tracemalloc.get_traced_memory()
        if ours:
            tracemalloc.stop()
        moved.read = _bytes_read() - before
        moved.made = peak - held + tensors.nbytes


class _Tensors(TorchFunctionMode):
    """Counts the bytes of tensors that operations make; views of others have none of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        known = {_address(value) for value in args if isinstance(value, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in known:
                self.nbytes += tensor.nbytes if _address(tensor) else 0
        return result


class Making(_Tensors):
    """Whether ``last`` was still in memory when an operation made a tensor, in `beside`."""

    def __init__(self, last: StorageWeakRef | None) -> None:
        super().__init__()
        self.last = last
        self.beside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.nbytes
        result = super().__torch_function__(func, types, args, kwargs)
        if self.last is not None and self.nbytes > before:
            self.beside |= not self.last.expired()
        return result


def memory_of(payload: object) -> StorageWeakRef | None:
    """By which it can be told whether the memory of a tensor is still held."""
    if isinstance(payload, torch.Tensor) and _address(payload):
        return StorageWeakRef(payload.untyped_storage())
    return None


def _address(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 if it has none, as on the meta device."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if dense else 0


def _bytes_read() -> int:
    if not _IO.exists():
        return 0
    return int(_IO.read_text().partition("rchar:")[2].split()[0])


@dataclass(frozen=True)
class Held:
    """The open files (Linux) and the threads of this process."""

    files: dict[int, str]
    threads: frozenset[threading.Thread]

    def __str__(self) -> str:
        return f"{len(self.files)} files and {len(self.threads)} threads"


def held() -> Held:
    """What is held now, once garbage is gone."""
    gc.collect()
    files: dict[int, str] = {}
    for number in os.listdir(_FILES) if _FILES.exists() else ():
        with contextlib.suppress(OSError):  # the listing's own, which is closed by now
            files[int(number)] = os.readlink(_FILES / number)
    return Held(files, frozenset(threading.enumerate()))


def left_since(before: Held) -> list[str]:
    """What is held now and was not ``before``, once threads had the time to end: one line each."""
    deadline = time.monotonic() + PATIENCE
    while True:
        now = held()
        threads = [f"thread {thread.name}" for thread in now.threads - before.threads]
        files = [f"file {path}" for number, path in now.files.items() - before.files.items()]
        if not (threads or files) or time.monotonic() > deadline:
            return sorted(threads + files)
        time.sleep(0.01)
