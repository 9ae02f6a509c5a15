"""Copies that keep every bit, and the threads that read what is deferred into its place."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamer import SourceError
from streamer.broadcast.fill import Fill, cut_regions
from streamer.broadcast.staging import Stage
from streamer.payloads import as_bytes, as_memoryview, as_raw
from streamer.trace import Trace

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "every other column": lambda t: t[:, ::2],
    "one column": lambda t: t[:, 1:2],
    "one row": lambda t: t[3],
    "expanded": lambda t: t[:, :1].expand(6, 5),
    "repeated rows": lambda t: t[:1].expand(4, 8),
    "scalar": lambda t: t[2, 3],
    "empty": lambda t: t[:, :0],
    "none": lambda t: t[:0],
    "permuted": lambda t: t.reshape(2, 3, 8).permute(2, 0, 1),
}


@pytest.fixture
def stage():
    made: list[Stage] = []

    def make(threads=3):
        made.append(Stage(torch.device("cpu"), threads, Trace(enabled=False)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for one in made:
        for thread in one._threads:
            thread.join(10)
            assert not thread.is_alive()


def to_bytes(tensor):
    return bytes(tensor.tolist())


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_bytes_is_the_logical_values(dtype, view, random_tensor, bytes_of):
    tensor = VIEWS[view](random_tensor(dtype, (6, 8)))
    data = as_bytes(tensor)
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    assert to_bytes(data) == bytes_of(tensor)
    assert as_raw(tensor).shape == tensor.shape


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_copied_in_place(dtype, view, stage, random_tensor, bytes_of):
    tensor = VIEWS[view](random_tensor(dtype, (6, 8)))
    buffer = torch.full((2000,), 0xAA, dtype=torch.uint8)
    fill = Fill(buffer)
    size = len(bytes_of(tensor))
    stage().add(fill, tensor, 32, size, lambda: None)
    assert to_bytes(buffer[32 : 32 + size]) == bytes_of(tensor)
    assert set(to_bytes(buffer[:32]) + to_bytes(buffer[32 + size :])) == {0xAA}
    assert fill.wait(0)


def test_lazy_conjugates_and_negations_are_applied():
    """Case 16: ``x.conj()`` and its ``imag`` are views with a flag."""
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    conj, imag = x.conj(), x.conj().imag
    assert conj.is_conj()
    assert imag.is_neg()
    assert as_bytes(conj).view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]
    assert as_bytes(imag).view(torch.float32).tolist() == [-2.0, 4.0]
    assert x.tolist() == [1 + 2j, 3 - 4j], "the source's own tensor is not touched"


def test_the_bits_of_a_nan_survive():
    bits = torch.tensor([0x7F800001, 0x7FC00002, -1], dtype=torch.int32)
    wide = torch.stack([bits, bits], 1)[:, 0]
    assert as_bytes(wide.view(torch.float32)).view(torch.int32).equal(bits)


def test_a_tensor_that_needs_a_gradient_can_be_sent():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert as_bytes(parameter).view(torch.float32).tolist() == [1, 1, 1]


def test_contiguous_tensors_are_not_copied():
    tensor = torch.arange(6.0)
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()


def test_a_memoryview_writes_through():
    tensor = torch.zeros(4, dtype=torch.uint8)
    view = as_memoryview(tensor[1:3])
    assert (view.format, view.nbytes, view.readonly) == ("B", 2, False)
    view[:] = b"\x07\x08"
    assert tensor.tolist() == [0, 7, 8, 0]


def test_a_deferred_tensor_is_read_in_parts_by_several_threads(
    stage, monkeypatch, deferred, random_tensor
):
    monkeypatch.setattr("streamer.broadcast.fill.SLOT_SIZE", 100)
    together = threading.Barrier(3, timeout=20)

    def meet(start, stop):
        if start < 300:
            together.wait()

    payload = deferred(random_tensor(torch.uint8, (950,)), meet)
    buffer = torch.zeros(1000, dtype=torch.uint8)
    fill = Fill(buffer)
    pool = stage(3)
    pool.add(fill, payload, 10, 950, lambda: None)
    pool.submit(fill, lambda: None)
    assert fill.wait(20)
    assert fill.error is None
    assert to_bytes(buffer[10:960]) == payload.data
    assert sorted(payload.parts) == [(n, min(n + 100, 950)) for n in range(0, 950, 100)]
    assert len(payload.threads) == 3
    assert set(to_bytes(buffer[:10]) + to_bytes(buffer[960:])) == {0}


def test_neighbours_are_read_by_one_job(stage, monkeypatch, deferred, random_tensor):
    """A job a tensor would be a system call and a switch of threads for every small one."""
    small = [deferred(random_tensor(torch.uint8, (5,), seed=i)) for i in range(8)]
    buffer = torch.zeros(60, dtype=torch.uint8)
    fill = Fill(buffer)
    pool = stage(4)
    for i, payload in enumerate(small):
        pool.add(fill, payload, 5 * i, 5, lambda: None)
    assert len(cut_regions(fill.segments)) == 1
    pool.submit(fill, lambda: None)
    assert fill.wait(20)
    assert to_bytes(buffer[:40]) == b"".join(payload.data for payload in small)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 25)), max_size=12),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_regions_cover_each_byte_once_and_leave_gaps_alone(pieces, slot, random):
    segments, place = [], 0
    for number, (gap, size) in enumerate(pieces):
        place += gap
        segments.append((number, 7, 7 + size, place))
        place += size
    random.shuffle(segments)
    wanted = {(n, at, place + at - start) for n, start, stop, place in segments
              for at in range(start, stop)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamer.broadcast.fill.SLOT_SIZE", slot)
        regions = cut_regions(segments)
        in_order = cut_regions(sorted(segments, key=lambda segment: segment[3]))
    assert regions == in_order, "neighbours are joined in whatever order they come"
    found = []
    for region in regions:
        end = region[0][3]
        for number, start, stop, offset in region:
            assert offset == end, "a region has no gap"
            end = offset + stop - start
            found += [(number, at, offset + at - start) for at in range(start, stop)]
        assert 0 < end - region[0][3] <= slot
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_what_a_read_raises_is_kept_and_the_others_go_on(
    stage, monkeypatch, deferred, random_tensor
):
    monkeypatch.setattr("streamer.broadcast.fill.SLOT_SIZE", 10)

    def fail(start, stop):
        if start == 20:
            raise SourceError("bad sector")

    payload = deferred(random_tensor(torch.uint8, (50,)), fail)
    fill = Fill(torch.zeros(50, dtype=torch.uint8))
    pool = stage(2)
    pool.add(fill, payload, 0, 50, lambda: None)
    pool.submit(fill, lambda: None)
    assert fill.wait(20)
    assert str(fill.error) == "bad sector"
    assert len(payload.parts) == 5
    healthy = Fill(torch.zeros(50, dtype=torch.uint8))
    pool.add(healthy, deferred(random_tensor(torch.uint8, (50,))), 0, 50, lambda: None)
    pool.submit(healthy, lambda: None)
    assert healthy.wait(20)
    assert healthy.error is None


def test_a_guard_stops_reads_before_they_begin(stage, deferred, random_tensor):
    payload = deferred(random_tensor(torch.uint8, (50,)))

    def guard():
        raise SourceError("over")

    fill = Fill(torch.zeros(50, dtype=torch.uint8))
    pool = stage(2)
    pool.add(fill, payload, 0, 50, lambda: None)
    pool.submit(fill, guard)
    assert fill.wait(20)
    assert str(fill.error) == "over"
    assert payload.parts == []


def test_empty_payloads_are_not_read(stage, deferred):
    payload = deferred(torch.zeros(0, 3))
    fill = Fill(torch.zeros(0, dtype=torch.uint8))
    pool = stage(1)
    pool.add(fill, payload, 0, 0, lambda: None)
    pool.submit(fill, lambda: None)
    assert fill.wait(0)
    assert payload.parts == []


def test_waiting_ends_at_its_timeout(stage, deferred, random_tensor):
    release = threading.Event()
    payload = deferred(random_tensor(torch.uint8, (5,)), lambda start, stop: release.wait(20))
    fill = Fill(torch.zeros(5, dtype=torch.uint8))
    pool = stage(1)
    pool.add(fill, payload, 0, 5, lambda: None)
    pool.submit(fill, lambda: None)
    started = time.monotonic()
    assert not fill.wait(0.1)
    assert time.monotonic() - started < 5
    release.set()
    assert fill.wait(20)


def test_readers_are_daemons(stage):
    """A read that hangs for ever must not keep the trainer from exiting."""
    pool = stage(2)
    assert [thread.daemon for thread in pool._threads] == [True, True]


def test_allocated_buffers_are_bytes(stage):
    buffer = stage().allocate(12)
    assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (12,), "cpu")
    assert stage().allocate(0).numel() == 0
