"""Nothing grows, whatever comes of the syncs: case 7."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import weakref

import pytest
import torch

import streamer
from kit_checks import both_modes
from kit_session import TIMEOUTS, weights
from streamer import (
    ChunkSent,
    DeferredTensor,
    ServerRefused,
    StreamerError,
    TensorSpec,
    WeightSource,
)
from streamer.broadcast.staging import Stage

pytestmark = pytest.mark.timeout(120)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@both_modes
def test_ten_syncs_leak_nothing(session, server, make_source, deferred, leaks, eventually, packed):
    one = session(server, packed=packed)
    source = make_source({n: deferred(t) for n, t in weights(1, count=20, size=5000).items()})
    for step in range(10):
        one.push(source)
        if step == 1:
            before, memory = leaks(), resident()
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)
    assert resident() - memory < 32 << 20


def test_ten_failed_syncs_leak_nothing(session, server, make_source, leaks, eventually):
    """Failed ones too, whichever side failed, also if the caller keeps the errors."""
    one = session(server)
    one.push(make_source(weights(1)))
    kept = []

    def fail(index):
        if index == 6:
            raise OSError("disk on fire")

    for step in range(10):
        if step % 2:
            server.fail("/update_weights", 500, "no", inside=True)
            source = make_source(weights(2))
        else:
            source = make_source(weights(2), on_step=fail)
        with pytest.raises(StreamerError) as caught:
            one.push(source)
        kept.append(caught.value)
        server.heal()
        one.push(make_source(weights(3)))
        if step == 1:
            before = leaks()
    assert len(kept) == 10
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)


class Stop(BaseException):
    """What no library expects."""


class Fresh(WeightSource):
    """Makes each tensor as it is asked for it, and remembers which are still there."""

    def __init__(self, tensors, fail_at=None, deferred_at=None):
        self._tensors, self._fail_at, self._deferred_at = tensors, fail_at, deferred_at
        self.made = []

    def specs(self):
        return [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self):
        for index, (name, tensor) in enumerate(self._tensors.items()):
            if index == self._fail_at:
                raise OSError("disk on fire")
            if index == self._deferred_at:
                yield name, Unreadable()
                continue
            mine = tensor.clone()
            self.made.append(weakref.ref(mine))
            yield name, mine
            del mine


class Unreadable(DeferredTensor):
    """Cannot be read."""

    def read_into(self, buffer, start, stop):
        raise OSError("disk on fire")


@both_modes
@pytest.mark.parametrize("side", ["server", "source", "both", "read", "observer"])
def test_an_error_that_is_kept_keeps_no_weights(
    session, server, make_source, monkeypatch, packed, side
):
    """Nor does the cycle of an error and a frame, which the next collection would end."""
    buffers = []

    def large():
        return [buffer for buffer in buffers if buffer() is not None and len(buffer()) > 1]

    def observe(event):
        if armed and isinstance(event, ChunkSent):
            raise Stop("on fire")

    def allocate(self, nbytes):
        memory = (ctypes.c_char * max(nbytes, 1))()
        buffers.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    monkeypatch.setattr(Stage, "allocate", allocate)
    armed = False
    one = session(server, packed=packed, on_event=observe)
    one.push(make_source(weights(1)))
    (whole,) = large()
    gc.collect()
    gc.disable()
    try:
        if side == "server":
            server.fail("/update_weights", 500, "no", inside=True)
        elif side == "both":
            server.fail("/start_weight_update", 500, "no", delay=0.5)
        fail_at = {"source": 9, "both": 1}.get(side)
        source = Fresh(weights(2), fail_at, 9 if side == "read" else None)
        armed = side == "observer"
        with pytest.raises((StreamerError, Stop), match=r"on fire|500 no") as caught:
            one.push(source)
        assert [tensor() for tensor in source.made if tensor() is not None] == []
        # The same memory serves the next sync, unless its group is gone.
        assert (whole() is None) == (side in ("server", "both"))
        if side == "both":
            failed = "the source failed as well: source failed at tensor 1 (layers.1.weight): "
            assert caught.value.__notes__ == [f"{failed}OSError: disk on fire"]
        armed = False
        server.heal()
        one.push(make_source(weights(3)))
        assert len(large()) == 1
        one.close()
        assert large() == [], caught.value
    finally:
        gc.enable()


class Once:
    """Makes a dict for one push, and knows whether it is still there: a model held twice."""

    def __init__(self):
        self._made = []

    def __call__(self):
        tensors = weights(1)
        self._made = list(map(weakref.ref, tensors.values()))
        return tensors

    @property
    def left(self):
        gc.collect()
        return [tensor() for tensor in self._made if tensor() is not None]


def test_an_error_that_is_kept_does_not_keep_the_source(server):
    once = Once()
    server.fail("/update_weights", 500, "no", inside=True)
    with pytest.raises(ServerRefused) as caught:
        streamer.push(once(), server.url, timeouts=TIMEOUTS)
    assert once.left == [], caught.value


def test_an_error_of_asyncio_that_is_kept_does_not_keep_the_source(server):
    once = Once()
    server.fail("/update_weights", 500, "no", inside=True)
    with pytest.raises(ServerRefused) as caught:
        asyncio.run(streamer.apush(once(), server.url, timeouts=TIMEOUTS))
    assert once.left == [], caught.value


def test_ten_sessions_leak_nothing(server, make_source, leaks, eventually):
    for step in range(10):
        with streamer.connect(server.url, timeouts=TIMEOUTS) as one:
            one.push(make_source(weights(step)))
        if step == 1:
            before = leaks()
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)


def test_a_failed_connect_leaves_nothing(server, leaks, eventually):
    before = leaks()
    for _ in range(3):
        server.fail("/init_weight_transfer_engine", 500, "no")
        with pytest.raises(ServerRefused):
            streamer.connect(server.url, timeouts=TIMEOUTS)
    eventually(lambda: all(now <= before[name] + 2 for name, now in leaks().items()), 10)
    assert leaks()["threads"] == 0
