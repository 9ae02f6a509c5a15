"""The transport fails."""

from __future__ import annotations

import threading
import time

import pytest

from kit_broadcaster import values
from kit_checks import PATIENCE, both_modes
from streamer import DeadlineExceeded, TransportError

pytestmark = pytest.mark.timeout(60)


@both_modes
@pytest.mark.parametrize("moment", ["before", "while staging", "while reading", "while sending"])
def test_an_abort_ends_the_sync_at_once(rig, make_source, deferred, packed, moment, eventually):
    good = values(1)
    reached = threading.Event()

    def pause(*_):
        reached.set()
        time.sleep(0.3)

    one = rig(packed=packed, buffer_size=19, progress=30)
    pairs = dict(good)
    source = make_source(pairs)
    if moment == "while staging":
        source = make_source(pairs, on_step=lambda index: index == 4 and pause())
    elif moment == "while reading":
        source = make_source({**pairs, "t4": deferred(good["t4"], pause)})
    elif moment == "while sending":
        one.workers[0].keep = lambda tensors: reached.set() or time.sleep(1)
    else:
        reached.set()

    def abort():
        reached.wait(PATIENCE)
        one.transport.abort("a server failed: 500")

    aborting = threading.Thread(target=abort)
    aborting.start()
    if moment == "before":
        aborting.join()
    started = time.monotonic()
    with pytest.raises(TransportError, match="a server failed: 500"):
        one.sync(source)
    assert time.monotonic() - started < 5
    aborting.join()


def test_a_worker_that_leaves_is_an_error(rig, make_source):
    one = rig(buffer_size=19)
    worker = one.workers[0]
    keep = worker.keep

    def leave(tensors):
        keep(tensors)
        if len(worker.chunks) == 2:
            worker.transport.close()

    worker.keep = leave
    with pytest.raises((TransportError, DeadlineExceeded)):
        one.sync(make_source(values(1)))


def test_a_worker_that_is_stuck_ends_at_the_deadline(rig, make_source):
    release = threading.Event()
    one = rig(buffer_size=19, progress=1)
    one.workers[0].keep = lambda tensors: release.wait(PATIENCE)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        one.sync(make_source(values(1)))
    assert 0.9 < time.monotonic() - started < 10
    release.set()


def test_closing_while_a_sync_is_stuck_leaves_no_thread(rig, make_source, eventually):
    one = rig(buffer_size=19, progress=30)
    release = threading.Event()
    one.workers[0].keep = lambda tensors: release.wait(PATIENCE)
    errors: list[BaseException] = []

    def push():
        try:
            one.sync(make_source(values(1)))
        except TransportError as error:
            errors.append(error)

    pushing = threading.Thread(target=push)
    pushing.start()
    eventually(lambda: one.group.log)
    started = time.monotonic()
    one.transport.close()
    one.broadcaster.close()
    pushing.join(PATIENCE)
    assert time.monotonic() - started < 5
    assert len(errors) == 1
    release.set()
