"""The source: every rank gathers tensor after tensor, and one of them sends."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from streamer_module.named import check_names
from torch import nn

from streamer.exceptions import SourceError
from streamer.ranks import Ranks
from streamer.source import TensorSpec, WeightSource
from streamer_fsdp import flat
from streamer_fsdp.tensors import Unit, find

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Gathers = Generator[tuple[str, torch.Tensor], None, None]


class ShardedSource(WeightSource):
    """A sharded module or state dict, looked at anew at every sync.

    Each tensor is gathered on the current stream of the thread that iterates, when it is its turn,
    and is whole when it is yielded; a collective over the ranks of its mesh, so all of them must
    iterate. The pushing thread gathers as far ahead of the broadcasts as there are staging buffers,
    while the sending thread broadcasts what it has gathered before: so gathers and broadcasts
    overlap.

    Outside of staging a rank holds at most two whole tensors at a time, both of them inside one
    gather (before and behind the padding of uneven shards): what was yielded is dropped before the
    next one is gathered. FSDP1 gathers a unit, of which the tensors are views, and frees it before
    the next unit. The model must not be changed, or used, while it is pushed.

    An iterator that is closed early leaves its gathers to `catch_up`, and to the next iterator.
    """

    def __init__(
        self,
        source: nn.Module | Mapping[str, torch.Tensor],
        tied: str,
        wrappers: str,
        group: ProcessGroup | None,
    ) -> None:
        self._source = source
        self._tied = tied
        self._wrappers = wrappers
        self.ranks = Ranks.of(group)
        self._alone = self.ranks.size == 1
        self._gathers: Gathers | None = None
        self._made = 0
        self._units()

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Whole shapes; the same on every rank."""
        return [
            TensorSpec(found.name, found.dtype, found.shape)
            for unit in self._units()
            for found in unit.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._stop_gathering()
        gathers = self._gathers = self._gather(self._units())
        self._made = 0
        try:
            # Not by a for loop, which would hold a pair while the next one is gathered.
            while (pair := next(gathers, None)) is not None:
                self._made += 1
                yield pair
                del pair
        finally:
            if self._alone:
                gathers.close()

    def catch_up(self, stop: int | None) -> None:
        """See `WeightSource.catch_up`. After a gather that has failed there is nothing to be done:
        the process group is out of step."""
        count = None if stop is None else max(stop - self._made, 0)
        try:
            deque(islice(self._gathers or (), count), maxlen=0)
        finally:
            self._stop_gathering()

    def close(self) -> None:
        """Drop what an iterator that was closed early still holds."""
        self._stop_gathering()

    def _stop_gathering(self) -> None:
        gathers, self._gathers = self._gathers, None
        if gathers is not None:
            gathers.close()

    def _gather(self, units: list[Unit]) -> Gathers:
        for unit in units:
            block = flat.gathered(unit.module) if unit.module else contextlib.nullcontext()
            with block:
                for found in unit.tensors:
                    whole = found.whole()
                    yield found.name, whole
                    del whole

    def _units(self) -> list[Unit]:
        """What to send. Raises `SourceError` that names the first tensor that cannot be sent."""
        units = find(self._source, self._wrappers)
        found = [found for unit in units for found in unit.tensors]
        if not found:
            raise SourceError("it has no parameters or persistent buffers: nothing to send")
        check_names((item.name, item.path) for item in found)
        if self._tied == "all":
            return units
        first: dict[object, str] = {}
        for item in found:
            first.setdefault(item.same, item.name)
        sent = set(first.values())
        return [
            replace(unit, tensors=[item for item in unit.tensors if item.name in sent])
            for unit in units
        ]
