"""Weights that every rank of a trainer holds whole, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamer.ranks import Ranks
from streamer.source import DeferredTensor, Payload, TensorSpec, WeightSource


class _Unread(DeferredTensor):
    """What a rank yields that does not send: nobody reads it."""

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        raise AssertionError("only the rank that sends reads a payload")


class Replicas(WeightSource):
    """A source that is the same on every rank: all push it, and rank 0 sends its own.

    The others read nothing. They wait until the servers have the weights, and raise if the sender
    fails: so no rank goes on with old weights on the server, or alone into its next collective.
    """

    def __init__(self, inner: WeightSource, ranks: Ranks) -> None:
        self._inner = inner
        self.ranks = ranks
        self.lasting = inner.lasting
        self.weight_version = inner.weight_version

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._inner.specs()

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        assert self.ranks is not None
        if self.ranks.sends:
            yield from self._inner
            return
        for spec in self._inner.specs():
            yield spec.name, _Unread()

    def progress(self) -> int:
        """See `WeightSource.progress`."""
        return self._inner.progress()

    def close(self) -> None:
        """Close the source inside."""
        self._inner.close()
