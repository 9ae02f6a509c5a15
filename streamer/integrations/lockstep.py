"""Weights that the ranks of a trainer can only produce together, as a framework's own code does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch

from streamer.ranks import Ranks
from streamer.source import TensorSpec, WeightSource, check_sendable

Pairs = Iterable[tuple[str, torch.Tensor]]


class Lockstep(WeightSource):
    """What ``pairs()`` yields on every rank of the process group: all push it, and rank 0 sends.

    ``pairs()`` is called afresh for every push, on every rank, and may be a collective at every
    step: it gathers shards, or exports layer by layer. It has to yield the same names, dtypes and
    shapes in the same order everywhere; a tensor may be overwritten at the next step. ``specs``
    says in advance what comes; without it the first push goes through the pairs once more, and
    this object should be kept for the next ones. ``ranks`` are those of the default group; outside
    of one, this process is alone.
    """

    def __init__(
        self,
        pairs: Callable[[], Pairs],
        specs: Sequence[TensorSpec] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._pairs = pairs
        self._specs = specs
        self._open: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._made = 0
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        self.ranks = ranks if ranks is not None or alone else Ranks.of()

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`."""
        if self._specs is None:
            found = []
            for name, tensor in self._pairs():
                check_sendable(name, tensor)
                found.append(TensorSpec(name, tensor.dtype, tuple(tensor.shape)))
                del tensor  # it would be held while the next one is made
            self._specs = found
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._made, self._open = 0, iter(self._pairs())
        for pair in self._open:
            self._made += 1
            yield pair
            del pair

    def catch_up(self, stop: int | None) -> None:
        """See `WeightSource.catch_up`: other ranks wait in what ``pairs`` does."""
        count = None if stop is None else max(stop - self._made, 0)
        deque(islice(self._open, count), maxlen=0)
        self._open = iter(())
