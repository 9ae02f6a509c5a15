"""`SourceSuite` on wrong sources: deferred tensors, what is left open, missing targets, plugins.

Each is made of the right one, which passes, and fails one check with both values in its message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kit_acme import WEIGHTS, Right, Stored, Suite, outcome
from streamer import SourceError, TensorSpec, WeightSource
from streamer.testing import SourceSuite

pytestmark = pytest.mark.timeout(60)


class ReadsFromTheStart(Stored):
    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        super().read_into(buffer, 0, stop - start)


class ReadsOn(Stored):
    """From where it was, as a stream does."""

    position = 0

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        self.position = self.position if start else 0
        super().read_into(buffer, self.position, self.position + stop - start)
        self.position += stop - start


class SeeksThenReads(Stored):
    """Right on one thread at a time."""

    position = 0

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        self.position = start
        time.sleep(0.0005)
        at = self.position
        super().read_into(buffer, at, at + stop - start)


class OnlyOnOneThread(Stored):
    def __init__(self, file: int, at: int) -> None:
        super().__init__(file, at)
        self.thread = threading.get_ident()

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        if threading.get_ident() != self.thread:
            raise RuntimeError("connection of another thread")
        super().read_into(buffer, start, stop)


class FillsTheObjectBehind(Stored):
    """Takes the buffer for the start of the object that it is a view of."""

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        memoryview(buffer.obj).cast("B")[: stop - start] = os.pread(
            self.file, stop - start, self.at + start
        )


class LeavesAFile(Right):
    """`close` finds all of them."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
        self.files: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self.files.append(os.open(self.path, os.O_RDONLY))
        yield from super().__iter__()
        os.close(self.files.pop())

    def close(self) -> None:
        super().close()
        for file in self.files:
            os.close(file)


class LeavesAThread(Right):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.stop = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        if not self.stop.is_set():
            ended = threading.Event()
            threading.Thread(target=self.prefetch, args=(ended,), name="prefetch").start()
            yield from super().__iter__()
            ended.set()

    def prefetch(self, ended: threading.Event) -> None:
        while not (ended.is_set() or self.stop.is_set()):
            ended.wait(0.01)

    def close(self) -> None:
        super().close()
        self.stop.set()


class GoesOnAfterAnEarlyClose(Right):
    """One iterator for all."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.left: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or list(WEIGHTS)
        while self.left:
            name = self.left.pop(0)
            yield name, WEIGHTS[name]


class KeepsItsFile(Right):
    left_open: ClassVar[list[int]] = []

    def close(self) -> None:
        self.left_open.append(self.file)


class MissingIsFound(Right):
    def __init__(self, path: str) -> None:
        super().__init__(path if os.path.exists(path) else "/dev/null")


class MissingIsForeign(Right):
    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDONLY)


class MissingSaysNothing(Right):
    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            raise SourceError("\n")
        super().__init__(path)


class Other(Right):
    """What another plugin has registered in the right one's place."""

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("z", torch.int16, (9,)), *super().specs()[1:]]


def of(deferred: type[Stored]) -> type[WeightSource]:
    """A source of the deferred tensors of one kind."""
    return type(deferred.__name__, (Right,), {"deferred": deferred})


BROADCASTS = ("broadcast_packed", "broadcast_per_tensor")
WRONG: list[tuple[type[WeightSource], tuple[str, ...], str]] = [
    (
        of(ReadsFromTheStart),
        ("deferred_tensors",),
        r"^[ab]: byte \d+ is 0x\w\w where all .* 0x\w\w where 4 threads read parts",
    ),
    (of(ReadsOn), ("deferred_tensors",), r"^[ab]: byte \d+ is 0x\w\w where all of the tensor"),
    (of(SeeksThenReads), ("deferred_tensors",), r"^[ab]: byte .* where 4 threads read parts, of"),
    (
        of(OnlyOnOneThread),
        ("deferred_tensors", *BROADCASTS),
        r"^[ab]: bytes \[\d+, \d+\) of \d+ cannot be read .*: RuntimeError: connection of anoth",
    ),
    (
        of(FillsTheObjectBehind),
        ("broadcast_packed",),
        r"^a, element \[0\]: 0 sent, 256 received, packed$",
    ),
    (LeavesAFile, ("early_close",), r"^closed at m 3 times, .* file .*weights: \d+ files and \d"),
    (LeavesAThread, ("early_close",), r"leaves thread prefetch, thread prefetch.* were held bef"),
    (
        GoesOnAfterAnEarlyClose,
        ("early_close",),
        r"tensor 0: z float32\[4, 6\] in a new source, .* after an early close$",
    ),
    (KeepsItsFile, ("close",), r"after b as the last tensor, leaves file .*weights: \d+ files"),
    (MissingIsFound, ("missing_target",), r"as if it were there, with z float32\[4, 6\]: raise"),
    (MissingIsForeign, ("missing_target",), r"raises FileNotFoundError: .*nothing'?: raise str"),
    (MissingSaysNothing, ("missing_target",), "raises a SourceError without a text"),
]


@pytest.mark.parametrize(
    ("wrong", "checks", "message"), WRONG, ids=[kind.__name__ for kind, _, _ in WRONG]
)
def test_a_wrong_source_fails_there_and_nowhere_else(
    fails_only: Callable[..., None],
    wrong: type[WeightSource],
    checks: tuple[str, ...],
    message: str,
) -> None:
    fails_only(wrong, checks, message)


def test_a_plugin_that_is_not_installed(tmp_path: Path) -> None:
    failed = outcome(Suite, tmp_path)
    assert list(failed) == ["entry_point"]
    assert "no source is registered for acme-suite://; installed: " in failed["entry_point"]
    assert "with an entry point in the group streamer" in failed["entry_point"]


def test_an_entry_point_to_something_else(tmp_path: Path, install: Callable[..., None]) -> None:
    install(Other)
    failed = outcome(Suite, tmp_path)
    assert list(failed) == ["entry_point"]
    assert "opens a Other, make_source() a Right" in failed["entry_point"]


def test_an_entry_point_to_other_weights(tmp_path: Path, install: Callable[..., None]) -> None:
    class Elsewhere(Suite):
        def target(self, tmp_path: Path) -> object:
            return f"{self.scheme}://elsewhere"

    class Here(Right):
        def __init__(self, path: str) -> None:
            super().__init__("/dev/null" if path == "elsewhere" else path)
            self.elsewhere = path == "elsewhere"

        def specs(self) -> Sequence[TensorSpec]:
            changed = [TensorSpec("z", torch.int8, (1,))] if self.elsewhere else []
            return [*changed, *super().specs()[len(changed) :]]

    install(Here)
    failed = outcome(type("TheSuite", (Elsewhere,), {"kind": Here}), tmp_path)
    assert list(failed) == ["entry_point"]
    assert "tensor 0: make_source() has z float32[4, 6], and" in failed["entry_point"]
    assert "has z int8[1]" in failed["entry_point"]


def test_what_an_author_must_write_is_named(tmp_path: Path) -> None:
    for name in ("make_source", "expected", "target", "make_missing"):
        arguments = () if name == "expected" else (tmp_path,)
        with pytest.raises(NotImplementedError, match=rf"^SourceSuite must define {name}\("):
            getattr(SourceSuite(), name)(*arguments)


def test_pytest_is_not_needed_to_import_it() -> None:
    code = "import sys; sys.modules['pytest'] = None; from streamer.testing import SourceSuite"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
