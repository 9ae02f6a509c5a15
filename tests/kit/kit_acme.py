"""A right source, the plugin that brings it, and its suite: what wrong ones are made of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from streamer import DeferredTensor, SourceError, TensorSpec, WeightSource
from streamer.testing import SourceSuite

WEIGHTS = {
    "z": torch.arange(24.0).view(4, 6),
    "m": torch.tensor(1.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 2),
    "a": torch.arange(7, dtype=torch.int16),
    "b": torch.arange(513, dtype=torch.uint8),
}


class Stored(DeferredTensor):
    """The bytes of a file that stays open."""

    def __init__(self, file: int, at: int) -> None:
        self.file, self.at = file, at

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        data = os.pread(self.file, stop - start, self.at + start)
        buffer[:] = data.ljust(len(buffer), b"?")


class Right(WeightSource):
    """``a`` and ``b`` are deferred; the others are borrowed from one buffer."""

    deferred: type[Stored] = Stored

    def __init__(self, path: str) -> None:
        try:
            self.file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"cannot open {path}: {error.strerror}") from error

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in WEIGHTS.items()]

    def __iter__(self) -> Iterator[Any]:
        at = 0
        buffer = torch.empty(4096, dtype=torch.uint8)
        for spec in self.specs():
            piece = self.deferred(self.file, at)
            at += spec.nbytes
            if spec.name in ("a", "b"):
                yield spec.name, piece
                continue
            view = buffer[: spec.nbytes]
            view.copy_(torch.tensor(list(os.pread(self.file, spec.nbytes, piece.at))).byte())
            yield spec.name, view.view(spec.dtype).view(spec.shape)
            buffer.fill_(0xEE)

    def close(self) -> None:
        os.close(self.file)


def data_of(weights: dict[str, torch.Tensor]) -> bytes:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in weights.values()]
    return bytes(torch.cat(flat).tolist())


class Suite(SourceSuite):
    """As an author writes it. The plugin is installed by the fixture ``install``."""

    kind: type[WeightSource] = Right
    scheme = "acme-suite"

    def make_source(self, tmp_path: Path) -> WeightSource:
        (tmp_path / "weights").write_bytes(data_of(WEIGHTS))
        return self.kind(str(tmp_path / "weights"))  # type: ignore[call-arg]

    def expected(self) -> dict[str, torch.Tensor]:
        return dict(sorted(WEIGHTS.items()))

    def target(self, tmp_path: Path) -> object:
        return f"{self.scheme}://{tmp_path / 'weights'}"

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return self.kind(str(tmp_path / "nothing"))  # type: ignore[call-arg]


def outcome(suite: type[SourceSuite], tmp_path: Path) -> dict[str, str]:
    """Run all tests of a suite: what those say that fail, by name without ``test_``."""
    failed: dict[str, str] = {}
    for name in dir(suite):
        if name.startswith("test_"):
            folder = tmp_path / name
            folder.mkdir()
            try:
                getattr(suite(), name)(folder)
            except AssertionError as error:
                failed[name.removeprefix("test_")] = str(error)
    return failed


def suite_of(kind: type[WeightSource]) -> type[Suite]:
    """`Suite` of another source."""
    return type("TheSuite", (Suite,), {"kind": kind})
