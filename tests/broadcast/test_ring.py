"""Pieces of one block of memory: never two in one place, and none waited for in vain."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from streamer.broadcast.ring import Ring

SIZES = st.integers(0, 1000)


@given(st.lists(SIZES, min_size=1, max_size=80), st.integers(1, 4))
def test_no_piece_overlaps_one_that_is_taken_and_every_one_comes(sizes, count):
    ring = Ring(torch.empty(Ring.size(max(sizes), count), dtype=torch.uint8))
    base, end = ring.memory.data_ptr(), ring.memory.data_ptr() + ring.memory.numel()
    taken: deque[tuple[int, int]] = deque()
    for size in sizes:
        while (piece := ring.take(size)) is None:
            # Whoever holds nothing waits for nothing.
            taken.popleft()
            ring.give_back()
        first, last = piece.data_ptr(), piece.data_ptr() + size
        assert piece.numel() == size
        if size:
            assert (first - base) % 256 == 0
            assert base <= first < last <= end
            assert all(last <= start or stop <= first for start, stop in taken)
            taken.append((first, last))
        else:
            taken.append((end, end))


@given(SIZES, st.integers(1, 5))
def test_it_holds_as_many_of_the_largest_as_it_was_made_for(largest, count):
    ring = Ring(torch.empty(Ring.size(largest, count), dtype=torch.uint8))
    for _ in range(3):
        for _ in range(count):
            assert ring.take(largest) is not None
        assert ring.take(largest) is None
        for _ in range(count):
            ring.give_back()


def test_it_holds_more_of_smaller_ones():
    ring = Ring(torch.empty(Ring.size(2560, 2), dtype=torch.uint8))
    assert [ring.take(256) is not None for _ in range(21)] == [True] * 20 + [False]


def test_cleared_it_is_free():
    ring = Ring(torch.empty(Ring.size(1000, 1), dtype=torch.uint8))
    assert ring.take(1000) is not None
    assert ring.take(1) is None
    ring.clear()
    assert ring.take(1000) is not None
