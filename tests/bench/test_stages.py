"""The stages themselves: what they move, and what is left of them when something breaks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer import DeferredTensor, SourceError, TensorSpec, TransportError, WeightSource
from streamer.bench import read
from streamer.bench.broadcast import Peer, measure_broadcast
from streamer.bench.null import NullTransport
from streamer.bench.read import Reading, measure_read, thread_counts
from streamer.bench.run import Bench, Devices

CPU = torch.device("cpu")


class Counted(DeferredTensor):
    """Bytes from nowhere. Notes each range that is read."""

    def __init__(self, log: list[int], fault: Exception | None = None) -> None:
        self.log, self.fault = log, fault

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.log.append(stop - start)


class Source(WeightSource):
    """``count`` tensors of 1 MiB."""

    def __init__(self, count: int, fault: Exception | None = None) -> None:
        self.count, self.fault = count, fault
        self.read: list[int] = []
        self.closed = 0

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(f"t{i}", torch.uint8, (1 << 20,)) for i in range(self.count)]

    def __iter__(self) -> Iterator[tuple[str, Counted]]:
        try:
            for i in range(self.count):
                yield f"t{i}", Counted(self.read, self.fault)
        finally:
            self.closed += 1


def test_reading_is_of_the_sample_and_of_each_byte_once() -> None:
    source = Source(10)
    with contextlib.closing(Reading(source, CPU, 2, sample=(4 << 20) - 1)) as reading:
        assert reading.plan.nbytes == 4 << 20
        reading.run()
        assert (sum(source.read), source.closed) == (4 << 20, 1)
        reading.run()
        assert (sum(source.read), source.closed) == (8 << 20, 2)


def test_rows_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "SAMPLE", 1 << 30)
    rows = list(measure_read(Source(3), 1, cached=False))
    assert [row.setting for row in rows][:2] == ["first time", "1 thread"]
    assert [row.value for row in rows[1:]] == thread_counts()
    assert {row.nbytes for row in rows} == {3 << 20}
    assert next(row.setting for row in measure_read(Source(3), 1, cached=True)) == "1 thread"


def test_the_null_transport_keeps_the_promises_of_one() -> None:
    transport = NullTransport(CPU)
    transport.connect(1)
    transport.broadcast(torch.zeros(4), 1)
    transport.wait(1)
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.broadcast(torch.zeros(4), 1)


def test_rows_of_broadcasting() -> None:
    before = threading.active_count()
    rows = list(measure_broadcast(CPU, CPU, 2, 20 << 20))
    assert [(row.value, row.nbytes) for row in rows] == [(1 << 20, 20 << 20), (16 << 20, 16 << 20)]
    assert all(len(row.seconds) == 2 and row.gb_per_s > 0.01 for row in rows)
    assert threading.active_count() == before


def test_a_peer_that_cannot_start_is_told_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match="the process that receives has died"):
        list(measure_broadcast(CPU, torch.device("cuda", 99), 1, 1 << 20))
    assert time.monotonic() - started < 30


def test_a_peer_that_cannot_receive_is_told_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match="the process that receives: "):
        list(measure_broadcast(CPU, torch.device("meta"), 1, 1 << 20))
    assert time.monotonic() - started < 30


def test_a_peer_that_dies_ends_the_wait() -> None:
    with Peer(CPU) as peer:
        peer.tell("checksum")
        assert peer.answer() == {}
        os.kill(peer.pid, signal.SIGKILL)
        os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
        peer.tell("checksum")  # into a pipe that is broken
        with pytest.raises(TransportError, match="has died"):
            peer.answer()
    assert not Path(f"/proc/{peer.pid}").exists()


def bench(source: WeightSource, **more: Any) -> Bench:
    def no_server() -> str:
        raise AssertionError("nothing is pushed here")

    given: dict[str, Any] = {"repeats": 1, "seconds": 30.0, "devices": Devices(None, None)}
    given |= {"urls": [], "server": no_server, "options": {}, "cached": True}
    return Bench(source, **{**given, **more})


def test_each_failure_is_kept_apart() -> None:
    result = bench(Source(2, SourceError("the disk is gone"))).run()
    assert result.failed == {
        "read": "the disk is gone",
        "end to end": "AssertionError: nothing is pushed here",
    }
    assert {row.stage for row in result.rows} == {"broadcast"}


def test_a_source_that_hangs_is_left_at_the_deadline() -> None:
    class Hanging(Source):
        def __iter__(self) -> Iterator[tuple[str, Counted]]:
            time.sleep(60)
            yield from super().__iter__()

    started = time.monotonic()
    work = bench(Hanging(1), seconds=0.5)
    work._measure("read", lambda: measure_read(work.source, 1, cached=True))
    assert time.monotonic() - started < 20
    assert work.result.failed["read"].startswith("read: not measured within 0.5 s")
