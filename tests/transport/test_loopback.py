"""The transport inside one process. What it promises here, every transport promises."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamer import DeadlineExceeded, TransportError
from streamer.testing.loopback import LoopbackGroup, LoopbackTransport

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def ranks(group, step, timeout=20):
    """Run ``step(transport)`` as every rank at once; results, or errors, in order of rank."""

    def run(rank):
        try:
            return step(group.transport(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(group.world_size) as pool:
        return list(pool.map(run, range(group.world_size), timeout=timeout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives(dtype, random_tensor, bytes_of):
    sent = random_tensor(dtype, (5, 3), seed=1)

    def step(transport):
        transport.connect(5)
        tensor = sent if transport.rank == 0 else torch.zeros_like(sent.view(torch.uint8))
        transport.broadcast(tensor.view(dtype), 5)
        transport.wait(5)
        return bytes_of(tensor.view(dtype))

    group = LoopbackGroup(3)
    assert ranks(group, step) == [bytes_of(sent)] * 3
    assert group.log == [sent.nbytes]


def test_tensors_of_no_and_of_any_dimensions():
    shapes = [(), (0,), (3, 0), (2, 2, 2)]

    def step(transport):
        transport.connect(5)
        for value, shape in enumerate(shapes, start=1):
            tensor = torch.full(shape, float(value if transport.rank == 0 else 0))
            transport.broadcast(tensor, 5)
            assert tensor.eq(value).all()
        return "done"

    group = LoopbackGroup(2)
    assert ranks(group, step) == ["done", "done"]
    assert group.log == [4, 32], "an empty tensor takes part in no collective"


def test_a_rank_outside_the_group_is_refused():
    group = LoopbackGroup(2)
    for rank in (-1, 2):
        with pytest.raises(TransportError, match=f"rank {rank} is not in a group of world size 2"):
            group.transport(rank)


def test_a_rank_that_does_not_come_ends_at_the_deadline():
    transport = LoopbackGroup(2).transport(0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        transport.connect(0.2)
    assert 0.15 < time.monotonic() - started < 5


@pytest.mark.parametrize("stuck_in", ["connect", "broadcast"])
@pytest.mark.parametrize("end", ["abort", "close"])
def test_abort_and_close_wake_what_is_stuck(stuck_in, end, eventually):
    transport = LoopbackGroup(2).transport(0)
    errors: list[BaseException] = []

    def stuck():
        try:
            if stuck_in == "connect":
                transport.connect(60)
            else:
                transport.broadcast(torch.zeros(3), 60)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=stuck)
    thread.start()
    eventually(lambda: transport._group.barrier.n_waiting == 1)
    started = time.monotonic()
    transport.abort("the test says so") if end == "abort" else transport.close()
    thread.join(10)
    assert time.monotonic() - started < 1
    reason = "the test says so" if end == "abort" else "closed"
    assert str(errors[0]) == f"broadcast group: {reason}"
    assert transport.aborted


def test_a_rank_that_leaves_wakes_the_others():
    group = LoopbackGroup(2)

    def step(transport):
        transport.connect(5)
        if transport.rank == 1:
            transport.close()
            return "left"
        transport.broadcast(torch.zeros(3), 60)
        return "sent"

    started = time.monotonic()
    sender, worker = ranks(group, step)
    assert worker == "left"
    assert isinstance(sender, TransportError), "it left: that is no deadline"
    assert "60 s" not in str(sender)
    assert time.monotonic() - started < 5


def test_an_aborted_transport_is_dead_and_says_why():
    transport = LoopbackGroup(1).transport(0)
    transport.connect(1)
    assert not transport.aborted
    transport.check()
    transport.abort("first reason")
    transport.abort("second reason")
    for use in (
        transport.check,
        lambda: transport.broadcast(torch.zeros(1), 1),
        lambda: transport.connect(1),
        lambda: transport.wait(1),
    ):
        with pytest.raises(TransportError, match="broadcast group: first reason"):
            use()
    transport.close()
    transport.close()


def test_a_size_that_differs_is_an_error_and_no_hang():
    def step(transport):
        transport.connect(5)
        transport.broadcast(torch.zeros(3 if transport.rank == 0 else 4), 5)
        return "sent"

    sender, worker = ranks(LoopbackGroup(2), step)
    assert sender == "sent"
    assert isinstance(worker, TransportError)
    assert str(worker) == "rank 0 broadcasts 12 bytes, rank 1 expects 16"


def test_a_borrowed_buffer_may_change_after_the_broadcast():
    """It has been received when the call returns: rank 0 may overwrite it at once."""

    def step(transport):
        transport.connect(5)
        buffer = torch.zeros(1000)
        total = 0.0
        for value in range(50):
            if transport.rank == 0:
                buffer.fill_(float(value))
            transport.broadcast(buffer, 5)
            total += buffer.sum().item()
        return total

    assert ranks(LoopbackGroup(3), step) == [1000.0 * sum(range(50))] * 3


def test_whoever_closes_waits_for_an_abort_that_is_under_way():
    begun, go = threading.Event(), threading.Event()
    ends = []

    class Slow(LoopbackTransport):
        def _abort(self):
            begun.set()
            assert go.wait(10)
            ends.append("aborted")

    transport = Slow(LoopbackGroup(1), 0)
    first = threading.Thread(target=transport.abort)
    first.start()
    assert begun.wait(10)
    second = threading.Thread(target=lambda: (transport.abort(), ends.append("went on")))
    second.start()
    second.join(0.2)
    assert ends == []
    go.set()
    first.join(10)
    second.join(10)
    assert ends == ["aborted", "went on"]
