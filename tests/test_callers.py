"""The threads that servers are called on."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from kit_checks import our_threads
from streamer.callers import Callers
from streamer.exceptions import StreamerError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def callers(no_threads_left):
    one = Callers()
    yield one
    one.close()


def fail(error):
    raise error


def test_steps_run_at_once_on_threads_that_are_kept(callers):
    for _ in range(5):
        together = threading.Barrier(4)
        futures = [callers.submit(partial(together.wait, 20)) for _ in range(4)]
        assert sorted(future.result(20) for future in futures) == [0, 1, 2, 3]
    names = {callers.submit(lambda: threading.current_thread().name).result(20) for _ in range(9)}
    assert names <= {f"streamer-http_{number}" for number in range(8)}


def test_what_a_step_raises_is_in_its_future(callers):
    error = StreamerError("no")
    assert callers.submit(lambda: fail(error)).exception(20) is error


def test_a_step_without_a_thread_is_never_run(callers, monkeypatch):
    callers.submit(lambda: None).result(20)
    began, go_on, ran = threading.Event(), threading.Event(), []
    busy = callers.submit(lambda: (began.set(), go_on.wait(20)))
    assert began.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: fail(RuntimeError("no thread")))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no thread"):
                callers.submit(lambda: ran.append(1))
    go_on.set()
    busy.result(20)
    assert callers.submit(lambda: "next").result(20) == "next"
    assert ran == []


def test_an_idle_thread_keeps_nothing(callers, eventually):
    class Thing:
        pass

    def step():
        thing = Thing()
        seen.append(weakref.ref(thing))
        raise StreamerError("no")

    seen: list[weakref.ref[Thing]] = []
    gc.disable()
    try:
        future = callers.submit(step)
        assert future.exception(20)
        del future
        eventually(lambda: seen[0]() is None, 5)
    finally:
        gc.enable()


def test_no_thread_is_left_by_a_close():
    one, together = Callers(), threading.Barrier(4)
    for future in [one.submit(partial(together.wait, 20)) for _ in range(4)]:
        future.result(20)
    one.close()
    assert our_threads() == []


def test_a_busy_thread_ends_when_its_step_does(no_threads_left):
    one, go_on = Callers(), threading.Event()
    future = one.submit(lambda: go_on.wait(20))
    one.close()
    one.close()
    go_on.set()
    assert future.result(20) is True
