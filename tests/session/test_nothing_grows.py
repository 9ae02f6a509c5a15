"""Nothing grows, whatever comes of the syncs: case 7."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref

import pytest
import torch

import streamer
from kit_checks import both_modes
from kit_session import TIMEOUTS, weights
from streamer import ServerRefused, StreamerError, TensorSpec, WeightSource
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


class Fresh(WeightSource):
    """Makes each tensor as it is asked for it, and remembers which are still there."""

    def __init__(self, tensors, fail_at=None):
        self._tensors, self._fail_at = tensors, fail_at
        self.made = []

    def specs(self):
        return [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self):
        for index, (name, tensor) in enumerate(self._tensors.items()):
            if index == self._fail_at:
                raise OSError("disk on fire")
            mine = tensor.clone()
            self.made.append(weakref.ref(mine))
            yield name, mine
            del mine


@both_modes
@pytest.mark.parametrize("side", ["server", "source"])
def test_an_error_that_is_kept_keeps_no_weights(
    session, server, make_source, monkeypatch, packed, side
):
    """Nor does the cycle of an error and a frame, which the next collection would end."""
    buffers = []

    def allocate(self, nbytes):
        memory = (ctypes.c_char * max(nbytes, 1))()
        buffers.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    monkeypatch.setattr(Stage, "allocate", allocate)
    one = session(server, packed=packed)
    one.push(make_source(weights(1)))
    (whole,) = [buffer for buffer in buffers if buffer() is not None and len(buffer()) > 1]
    gc.collect()
    gc.disable()
    try:
        if side == "server":
            server.fail("/update_weights", 500, "no", inside=True)
        source = Fresh(weights(2), fail_at=9 if side == "source" else None)
        with pytest.raises(StreamerError, match=r"on fire|500 no") as caught:
            one.push(source)
        assert [tensor() for tensor in source.made if tensor() is not None] == []
        # The same memory serves the next sync, unless its group is gone.
        assert (whole() is None) == (side == "server")
        server.heal()
        one.push(make_source(weights(3)))
        alive = [buffer for buffer in buffers if buffer() is not None and len(buffer()) > 1]
        assert len(alive) == 1, caught.value
    finally:
        gc.enable()


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
