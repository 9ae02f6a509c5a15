"""The source: every tensor whole again, one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from streamer import DeferredTensor, Payload, TensorSpec, WeightSource
from streamer_plugin_example.checkpoint import Shards, read_settings
from streamer_plugin_example.layout import COLUMNS, WHOLE, Fused, fuse


class AcmeSource(WeightSource):
    """A step of the trainer: ``acme://folder``.

    Tensors that the ranks share by rows are runs of bytes in the files, and stay there: the
    broadcaster's threads read them where they are sent from. Those shared by columns are put
    together in one buffer, which the next of them overwrites. Raises `SourceError` at the opening
    if files are missing, damaged, of different steps, or hold what no rule is for.
    """

    def __init__(self, rest: str | os.PathLike[str]) -> None:
        folder = Path(rest).expanduser()
        settings = read_settings(folder)
        self._shards = Shards(folder, settings.tensor_parallel)
        try:
            self._fused = [fused for spec in self._shards.specs for fused in fuse(settings, spec)]
        except BaseException:
            self.close()
            raise
        self.weight_version = f"acme-step-{settings.step}"

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Known since the opening."""
        return [fused.spec for fused in self._fused]

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        columns = [fused.spec.nbytes for fused in self._fused if fused.shared == COLUMNS]
        buffer = torch.empty(max(columns, default=0), dtype=torch.uint8)
        with self._shards.parts() as parts:
            for fused in self._fused:
                ranks = parts[fused.source.name]
                if fused.shared == COLUMNS:
                    payload: Payload = _side_by_side(fused, ranks, buffer)
                else:
                    payload = _one_below_the_other(fused, ranks)
                yield fused.spec.name, payload

    def close(self) -> None:
        """Close the files."""
        self._shards.close()


@dataclass(frozen=True, slots=True)
class Stacked(DeferredTensor):
    """Bytes ``[first, first + size)`` of each of ``ranks``, one after another."""

    ranks: Sequence[DeferredTensor]
    first: int
    size: int

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        """See `DeferredTensor.read_into`: as many reads as there are ranks in ``[start, stop)``."""
        at = start
        while at < stop:
            rank, offset = divmod(at, self.size)
            count = min(self.size - offset, stop - at)
            begin = self.first + offset
            self.ranks[rank].read_into(
                buffer[at - start : at - start + count], begin, begin + count
            )
            at += count


def _one_below_the_other(fused: Fused, ranks: Sequence[DeferredTensor]) -> Stacked:
    row = math.prod(fused.source.shape[1:]) * fused.source.dtype.itemsize
    count = fused.rows.stop - fused.rows.start
    used = ranks[:1] if fused.shared == WHOLE else ranks
    return Stacked(used, fused.rows.start * row, count * row)


def _side_by_side(
    fused: Fused, ranks: Sequence[DeferredTensor], buffer: torch.Tensor
) -> torch.Tensor:
    """Holds one rank's part besides ``buffer``."""
    spec, part = fused.spec, fused.source
    whole = buffer[: spec.nbytes].view(spec.dtype).view(spec.shape)
    data = bytearray(part.nbytes)
    for columns, rank in zip(whole.tensor_split(len(ranks), dim=1), ranks, strict=True):
        rank.read_into(memoryview(data), 0, part.nbytes)
        columns.copy_(torch.frombuffer(data, dtype=part.dtype).view(part.shape))
    return whole
