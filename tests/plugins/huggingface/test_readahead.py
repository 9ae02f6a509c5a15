"""Reads that share requests: every byte right, each fetched once, few requests."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamer_huggingface import readahead
from streamer_huggingface.readahead import ReadAhead

from streamer import SourceError
from streamer.broadcast.fill import SLOT_SIZE, cut_regions


class Numbers:
    """A file whose bytes tell where they are, and which writes down what was asked of it."""

    def __init__(self, size: int, fails: int = 0) -> None:
        self.data = bytes(i * 7 % 251 for i in range(size))
        self.asked: list[tuple[int, int]] = []
        self.fails = fails

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, start: int, what: str) -> None:
        self.asked.append((start, start + len(buffer)))
        if self.fails:
            self.fails -= 1
            raise SourceError(f"{what}: broken")
        buffer[:] = self.data[start : start + len(buffer)]


def read(part, start: int, stop: int) -> bytes:
    data = bytearray(stop - start)
    part.read_into(memoryview(data), start, "tensor w")
    return bytes(data)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(readahead, "BLOCK_SIZE", 16)
    monkeypatch.setattr(readahead, "MAX_HELD", 1 << 20)


class TestRequests:
    def test_a_long_read_goes_straight(self):
        file = Numbers(100)
        ahead = ReadAhead()
        part = ahead.of(file, [(0, 100)])
        assert read(part, 3, 19) == file.data[3:19]
        assert file.asked == [(3, 19)]
        assert ahead._held == 0

    def test_short_reads_share_one(self):
        file = Numbers(100)
        ahead = ReadAhead()
        part = ahead.of(file, [(0, 100)])
        assert [read(part, i, i + 4) for i in (0, 4, 12, 8)] == [
            file.data[i : i + 4] for i in (0, 4, 12, 8)
        ]
        assert file.asked == [(0, 16)]
        assert ahead._held == 0

    def test_none_reaches_into_what_is_not_wanted(self):
        file = Numbers(100)
        part = ReadAhead().of(file, [(0, 10), (20, 25), (50, 100)])
        for start, stop in [(0, 5), (5, 10), (20, 25), (50, 53)]:
            read(part, start, stop)
        assert file.asked == [(0, 10), (20, 25), (50, 66)]

    def test_none_reaches_into_what_was_asked_for(self):
        file = Numbers(100)
        part = ReadAhead().of(file, [(0, 100)])
        read(part, 10, 26)
        read(part, 0, 4)
        read(part, 4, 12)
        assert file.asked == [(10, 26), (0, 10), (10, 12)]  # bytes 10 and 11 for a second reader

    def test_what_is_read_twice_is_fetched_twice(self):
        file = Numbers(100)
        part = ReadAhead().of(file, [(0, 100)])
        assert read(part, 0, 40) == read(part, 0, 40) == file.data[:40]

    def test_tensors_that_nobody_reads_cost_no_memory_for_ever(self, monkeypatch):
        monkeypatch.setattr(readahead, "MAX_HELD", 64)
        file = Numbers(1600)
        ahead = ReadAhead()
        part = ahead.of(file, [(0, 1600)])
        for start in range(0, 1600, 16):
            assert read(part, start, start + 2) == file.data[start : start + 2]
            assert ahead._held <= 64
        assert read(part, 2, 4) == file.data[2:4]

    def test_an_error_reaches_everybody_and_is_not_kept(self):
        file = Numbers(100, fails=1)
        ahead = ReadAhead()
        part = ahead.of(file, [(0, 100)])
        with pytest.raises(SourceError, match="tensor w: broken"):
            read(part, 0, 4)
        assert ahead._held == 0
        assert read(part, 4, 8) == file.data[4:8]

    def test_readers_wait_for_the_one_that_fetches(self):
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Numbers):
            def read_into(self, buffer: memoryview, start: int, what: str) -> None:
                entered.set()
                assert go_on.wait(10)
                super().read_into(buffer, start, what)

        file = Slow(100)
        part = ReadAhead().of(file, [(0, 100)])
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(read, part, 0, 4)
            assert entered.wait(10)
            other = pool.submit(read, part, 4, 8)
            go_on.set()
            assert one.result(10) + other.result(10) == file.data[:8]
        assert file.asked == [(0, 16)]


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    chunk=st.integers(1, 10),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_any_tensors_in_any_pieces_in_any_order_by_any_thread(sizes, chunk, threads, seed):
    """As the broadcaster reads: jobs of neighbours, chunk after chunk, each by some thread."""
    rng = random.Random(seed)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    file = Numbers(sum(sizes))
    part = ReadAhead().of(file, [(0, file.size)])
    found = bytearray(file.size)
    jobs = []
    for first in range(0, len(sizes), chunk):
        tensors = [(starts[i], starts[i] + sizes[i]) for i in range(first, len(sizes))[:chunk]]
        cut = [(a, m, b) for a, b in tensors for m in [rng.randint(a, b)]]
        spans = [(a, m) for a, m, _ in cut] + [(m, b) for _, m, b in cut]
        jobs += [sorted(spans)[i::2] for i in range(2)]

    def job(spans: list[tuple[int, int]]) -> None:
        for start, stop in spans:
            part.read_into(memoryview(found)[start:stop], start, "w")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(job, jobs))
    assert found == file.data
    asked = sorted(file.asked)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(asked))
    assert sum(stop - start for start, stop in asked) == file.size


def test_the_requests_of_a_real_plan_are_near_one_a_block(monkeypatch):
    """Sixteen readers, and eight layers of 400 MB in chunks cut as the broadcaster cuts them."""
    monkeypatch.undo()
    sizes = []
    for _ in range(8):
        sizes += [8192] * 2 + [33_554_432, 8_388_608, 8_388_608, 33_554_432] + [117_440_512] * 3

    class Counted:
        size = sum(sizes)

        def __init__(self) -> None:
            self.asked: list[int] = []

        def read_into(self, buffer: memoryview, start: int, what: str) -> None:
            self.asked.append(len(buffer))

    file = Counted()
    part = ReadAhead().of(file, [(0, file.size)])
    buffer = memoryview(bytearray(SLOT_SIZE))
    segments, offset, start = [], 0, 0

    def job(region) -> None:
        for read_into, begin, end, _ in region:
            read_into(buffer[: end - begin], begin, end)

    with ThreadPoolExecutor(16) as pool:
        for size in [*sizes, None]:
            if size is None or offset > 256 << 20:
                list(pool.map(job, cut_regions(segments)))
                segments, offset = [], 0
            if size is not None:
                at = start
                segments.append(
                    (
                        lambda view, a, b, at=at: part.read_into(view, at + a, "w"),
                        0,
                        size,
                        offset,
                    )
                )
                offset, start = offset + size, start + size
    assert sum(file.asked) == file.size
    ideal = file.size / readahead.BLOCK_SIZE
    print(f"{len(file.asked)} requests for {file.size} bytes, {ideal:.0f} would be the least")
    assert len(file.asked) <= 1.25 * ideal
