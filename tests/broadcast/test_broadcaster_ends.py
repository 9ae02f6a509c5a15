"""Nothing of a sync that is over runs on."""

from __future__ import annotations

import threading
import time

import pytest

from kit_broadcaster import values
from kit_checks import PATIENCE
from streamer import SourceError, StreamerError, TransportError

pytestmark = pytest.mark.timeout(60)


def test_reads_of_calls_that_were_never_opened_do_not_spoil_the_next_sync(
    rig, expect, make_source, deferred, eventually
):
    """The chunk of a later call was staged ahead; its read wakes up in the middle of the next."""
    first, second = values(1, count=3), values(2, count=3)
    reading, release = threading.Event(), threading.Event()

    def fail(start, stop):
        reading.wait(PATIENCE)
        raise OSError("bad sector")

    def linger(start, stop):
        reading.set()
        release.wait(3)

    lingering = deferred(first["t1"], linger)
    pairs = {"t0": deferred(first["t0"], fail), "t1": lingering, "t2": first["t2"]}
    one = rig(buffer_size=9, call_size=1, num_buffers=2, threads=2)
    with pytest.raises(SourceError, match="bad sector"):
        one.sync(make_source(pairs))

    def wake(index):
        if index == 1:
            release.set()
            time.sleep(0.3)

    one.on_call = wake
    one.sync(make_source(second))
    expect(one, second)


@pytest.mark.parametrize("how", ["well", "begin fails", "a read fails"])
def test_nothing_is_read_after_the_iterator_has_ended(rig, expect, make_source, deferred, how):
    """A generator that opens its files in a ``with`` closes them when it ends, or is closed."""
    reading = threading.Event()
    ended = threading.Event()
    too_late: list[tuple[int, int]] = []

    def slow(start, stop):
        reading.set()
        time.sleep(0.2)
        if ended.is_set():
            too_late.append((start, stop))

    def fail(start, stop):
        reading.wait(PATIENCE)
        raise OSError("bad sector")

    class Files(make_source):
        def __iter__(self):
            try:
                yield from super().__iter__()
            finally:
                ended.set()

    good = values(1, count=4)
    pairs = {name: deferred(tensor, slow) for name, tensor in good.items()}
    if how == "a read fails":
        pairs["t0"] = deferred(good["t0"], fail)
    one = rig(buffer_size=9, call_size=1, num_buffers=3, threads=3)

    def begin():
        if how == "begin fails":
            reading.wait(PATIENCE)
            raise TransportError("a server refused")

    one.begin = begin
    if how == "well":
        one.sync(Files(pairs))
        expect(one, good)
    else:
        with pytest.raises(StreamerError):
            one.sync(Files(pairs))
    assert ended.is_set()
    time.sleep(0.5)
    assert too_late == []


def test_many_syncs_leak_nothing(rig, make_source, deferred, leaks, eventually):
    one = rig(buffer_size=19)

    def once(seed):
        good = values(seed)
        one.sync(make_source({n: deferred(t) for n, t in good.items()}))
        with pytest.raises(SourceError):
            one.sync(make_source(list(good.items())[:-1], make_source(good).specs()))

    once(0)
    before = leaks()
    for seed in range(1, 8):
        once(seed)
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)
