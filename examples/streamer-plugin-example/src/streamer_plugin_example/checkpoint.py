"""A step as the trainer leaves it: ``trainer.json``, and a safetensors file for each rank.

Every rank has every tensor, under one name: its own part of it, or, of norms, all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import streamer
from streamer import DeferredTensor, SourceError, TensorSpec, WeightSource


@dataclass(frozen=True)
class Settings:
    """``trainer.json``. All numbers are those of the whole model."""

    step: int
    tensor_parallel: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


def read_settings(folder: Path) -> Settings:
    """Raises `SourceError` if there is no checkpoint, or one that this version does not know."""
    file = folder / "trainer.json"
    try:
        found = json.loads(file.read_bytes())
        values = {field.name: found[field.name] for field in fields(Settings)}
    except FileNotFoundError:
        raise SourceError(
            f"{folder} is no checkpoint of Acme: it has no trainer.json (name the folder of a step)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise SourceError(f"{file}: {name} must be a positive integer, not {value!r}")
    settings = Settings(**values)
    for name in ("heads", "kv_heads"):
        if values[name] % settings.tensor_parallel:
            raise SourceError(
                f"{file}: {values[name]} {name} cannot be split over {settings.tensor_parallel} "
                "ranks: the trainer does not write that, so the file is damaged"
            )
    return settings


class Shards:
    """The files of all ranks, open until `close`.

    They are opened by streamer's own safetensors source, which checks them, and whose deferred
    tensors read any part of a tensor from any thread.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        files = [folder / f"rank-{rank:02d}.safetensors" for rank in range(ranks)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise SourceError(
                f"{folder} lacks {', '.join(missing)} of {ranks} ranks: copy all files of the step"
            )
        self.files = files
        with ExitStack() as opened:
            self._ranks: list[WeightSource] = [
                opened.enter_context(closing(streamer.open_source(file))) for file in files
            ]
            self.specs = list(self._ranks[0].specs())
            for file, rank in zip(files[1:], self._ranks[1:], strict=True):
                _compare(self.specs, rank.specs(), files[0], file)
            self._opened = opened.pop_all()

    @contextmanager
    def parts(self) -> Iterator[dict[str, list[DeferredTensor]]]:
        """Every tensor's parts, by rank, to be read inside the block only."""
        found: dict[str, list[DeferredTensor]] = {spec.name: [] for spec in self.specs}
        iterators = [iter(rank) for rank in self._ranks]
        for iterator in iterators:
            # Not to its end: a source may close its files when it ends.
            for name, part in islice(iterator, len(found)):
                assert isinstance(part, DeferredTensor)
                found[name].append(part)
        yield found
        del iterators

    def close(self) -> None:
        """Close all files."""
        self._opened.close()


def _compare(first: Sequence[TensorSpec], other: Sequence[TensorSpec], a: Path, b: Path) -> None:
    ours, theirs = ({spec.name: str(spec) for spec in specs} for specs in (first, other))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise SourceError(
                f"{a.name} has {ours.get(name, f'no {name}')}, {b.name} has "
                f"{theirs.get(name, f'no {name}')}: the files in {a.parent} are of different steps"
            )
