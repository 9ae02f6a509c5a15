"""The digest: equal for equal bytes however they lie in memory, and another for any other bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer import digest as module
from streamer.digest import SMALL, StreamDigest

CPU = torch.device("cpu")
ROW = 8 * module.WORDS
SIZES = (1, 7, 8, 9, 1000, ROW - 1, ROW, ROW + 1, SMALL - 1, SMALL, SMALL + 13, SMALL + 32 * ROW)
"""Around every boundary: words, rows, the blocks of a CPU, and what is collected first."""


def digest(*pieces: torch.Tensor) -> str:
    one = StreamDigest(CPU)
    for piece in pieces:
        one.add(piece)
    return one.hexdigest()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


sizes = st.sampled_from(SIZES) | st.integers(1, 3 * ROW)
seeds = st.integers(0, 2**31)


@given(size=sizes, seed=seeds, data=st.data())
def test_any_flipped_bit_is_found(size, seed, data):
    before = noise(size, seed)
    after = before.clone()
    after[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(before) != digest(after)


@given(size=sizes, data=st.data())
def test_a_flipped_bit_among_zeros_is_found(size, data):
    """Where neighbours say nothing, and a sign bit is all that differs."""
    after = torch.zeros(size, dtype=torch.uint8)
    after[data.draw(st.integers(0, size - 1))] = 1 << data.draw(st.integers(0, 7))
    assert digest(after) != digest(torch.zeros(size, dtype=torch.uint8))


@given(rows=st.integers(1, 3) | st.sampled_from([SMALL // ROW + 2]), seed=seeds, data=st.data())
def test_any_two_words_that_change_places_are_found(rows, seed, data):
    count = rows * module.WORDS
    before = noise(8 * count, seed).view(torch.int64)
    first, second = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    if data.draw(st.booleans()):  # they differ in one bit, which no product with an even number has
        before[second] = before[first] ^ -(1 << 63)
    after = before.clone()
    after[first], after[second] = before[second], before[first]
    assert (digest(before) != digest(after)) == (not torch.equal(before, after))


@given(st.lists(sizes, min_size=2, max_size=5), seeds, st.data())
def test_pieces_that_change_places_or_are_missing_are_found(counts, seed, data):
    pieces = [noise(count, seed + number) for number, count in enumerate(counts)]
    right = digest(*pieces)
    moved = data.draw(st.permutations(pieces))
    same = all(map(torch.equal, moved, pieces))
    assert (digest(*moved) == right) == same
    gone = data.draw(st.integers(0, len(pieces) - 1))
    assert digest(*pieces[:gone], *pieces[gone + 1 :]) != right


@given(st.lists(sizes, min_size=1, max_size=4), seeds, st.data())
def test_a_piece_that_is_stale_is_found(counts, seed, data):
    """A buffer that holds what came before, in whole or from some byte on."""
    pieces = [noise(count, seed + number) for number, count in enumerate(counts)]
    right = digest(*pieces)
    at = data.draw(st.integers(0, len(pieces) - 1))
    start = data.draw(st.integers(0, counts[at] - 1))
    old = noise(counts[at], seed + 1000)
    if torch.equal(old[start:], pieces[at][start:]):
        return
    stale = torch.cat([pieces[at][:start], old[start:]])
    assert digest(*pieces[:at], stale, *pieces[at + 1 :]) != right


@given(size=sizes, shift=st.integers(1, 64), seed=seeds)
def test_bytes_that_are_shifted_are_found(size, shift, seed):
    data = noise(size, seed)
    moved = data.roll(shift)
    assert (digest(data) == digest(moved)) == torch.equal(data, moved)


def test_zeros_of_other_sizes_are_not_the_same():
    """Chunks are padded to whole rows: padding must not count as data."""
    zeros = [torch.zeros(n * ROW + SMALL, dtype=torch.uint8) for n in range(3)]
    assert len({digest(), *map(digest, zeros), digest(zeros[0], zeros[0])}) == 5


@settings(max_examples=30)
@given(counts=st.lists(sizes, min_size=1, max_size=6), seed=seeds)
def test_where_bytes_lie_does_not_matter(counts, seed):
    """One rank broadcasts its own tensors, which start anywhere; another receives into buffers."""
    aligned, crooked = StreamDigest(CPU), StreamDigest(CPU)
    for number, count in enumerate(counts):
        piece = noise(count, seed + number)
        aligned.add(piece)
        memory = torch.empty(count + 8, dtype=torch.uint8)
        start = 1 + (seed + number) % 7
        memory[start : start + count] = piece
        crooked.add(memory[start : start + count])
    assert aligned.hexdigest() == crooked.hexdigest()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64],
)
def test_a_tensor_counts_by_its_bytes(dtype, random_tensor):
    tensor = random_tensor(dtype, (7, 300))
    assert digest(tensor) == digest(tensor.view(-1).view(torch.uint8))
    assert digest(tensor[0, 0]) == digest(tensor.view(-1).view(torch.uint8)[: dtype.itemsize])


def test_an_empty_tensor_does_not_count():
    assert digest(torch.empty(0, 4), torch.ones(3)) == digest(torch.ones(3))


def test_blocks_are_a_matter_of_speed_alone(monkeypatch):
    """A GPU sums a piece at once, a CPU in blocks; the two must agree."""
    pieces = [noise(size, size) for size in SIZES]
    right = digest(*pieces)
    for block in (ROW, 7 * ROW, 1 << 30):
        monkeypatch.setattr(module, "_BLOCK", block)
        assert digest(*pieces) == right


def test_what_it_has_cost_is_told():
    one = StreamDigest(CPU)
    one.add(noise(SMALL))
    one.hexdigest()
    assert 0 < one.seconds < 5
