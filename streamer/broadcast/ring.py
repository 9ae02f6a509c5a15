"""The memory that chunks are staged in, used round and round."""

from __future__ import annotations

from collections import deque

import torch

_ALIGNMENT = 256


class Ring:
    """Pieces of one block of memory, given back in the order in which they were taken.

    Sized for a few of the largest chunk, it holds many of the usual ones: what is staged ahead
    covers the time in which nothing can be sent. Not thread-safe.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: deque[tuple[int, int]] = deque()

    @staticmethod
    def size(largest: int, count: int) -> int:
        """Bytes that hold ``count`` chunks of ``largest`` bytes."""
        return _piece(largest) * count

    def take(self, nbytes: int) -> torch.Tensor | None:
        """``nbytes`` bytes in one piece, or None if that has to wait for others."""
        size = _piece(nbytes)
        start = 0
        if self._taken:
            oldest, (last, length) = self._taken[0][0], self._taken[-1]
            start = last + length
            if last >= oldest and start + size > self.memory.numel():
                start = 0
            if start <= oldest and start + size > oldest:
                return None
        if start + size > self.memory.numel():
            return None
        self._taken.append((start, size))
        return self.memory[start : start + nbytes]

    def give_back(self) -> None:
        """The piece that was taken first is free."""
        self._taken.popleft()

    def clear(self) -> None:
        """All is free."""
        self._taken.clear()


def _piece(nbytes: int) -> int:
    return max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
