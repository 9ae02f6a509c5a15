"""What is done on all servers at once. Whole syncs into several are in tests/faults."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import streamer
from streamer import (
    Held,
    PushCancelled,
    Remedy,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
    Timeouts,
)
from streamer import fleet as fleet_module
from streamer.drivers.mark import INCOMPLETE
from streamer.fleet import Fleet
from streamer.options import Options
from streamer.timeouts import Clock

pytestmark = pytest.mark.timeout(60)


class Hanging:
    """A server's driver whose steps hang until they are cancelled, or end by themselves."""

    def __init__(self, url, seconds=30.0):
        self.url, self.seconds = url, seconds
        self.cancelled = threading.Event()

    def step(self):
        if self.cancelled.wait(self.seconds):
            raise ServerUnreachable(f"{self.url}: cancelled")
        return self.url

    def cancel(self):
        self.cancelled.set()

    def close(self):
        pass


class Refusing(Hanging):
    def step(self):
        raise ServerRefused(f"{self.url}: no", 500)


@pytest.fixture
def fleet(monkeypatch, no_threads_left):
    made = []

    def make(*drivers):
        one = Fleet(drivers, Options(), Clock(Timeouts()))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def test_the_first_that_fails_ends_the_others(fleet, monkeypatch):
    monkeypatch.setattr(fleet_module, "_GRACE_SECONDS", 0.2)
    hanging, soon = Hanging("a"), Hanging("b", seconds=0.05)
    one = fleet(hanging, Refusing("c"), soon)
    started = time.monotonic()
    with pytest.raises(ServerRefused, match="c: no"):
        one.each(lambda driver: driver.step())
    assert time.monotonic() - started < 5
    assert hanging.cancelled.is_set()
    assert not soon.cancelled.is_set(), "it has answered meanwhile"


def test_what_is_to_be_done_to_the_end_is(fleet, monkeypatch):
    monkeypatch.setattr(fleet_module, "_GRACE_SECONDS", 0.0)
    slow = Hanging("a", seconds=0.5)
    with pytest.raises(ServerRefused, match="c: no"):
        fleet(slow, Refusing("c")).each(lambda driver: driver.step(), to_the_end=True)
    assert not slow.cancelled.is_set()


def test_results_are_in_the_order_of_the_servers(fleet):
    drivers = [Hanging(name, seconds=0.2 / (n + 1)) for n, name in enumerate("abc")]
    assert fleet(*drivers).each(lambda driver: driver.step()) == ["a", "b", "c"]


def test_the_first_of_several_errors_is_raised_and_tells_the_others(fleet):
    urls = [f"s{number}" for number in range(8)]
    with pytest.raises(ServerRefused) as caught:
        fleet(*map(Refusing, urls)).each(lambda driver: driver.step())
    assert str(caught.value) == "s0: no"
    assert caught.value.__notes__ == [f"meanwhile, {url}: {url}: no" for url in urls[1:]]


def test_what_was_only_given_up_is_not_told(fleet, monkeypatch):
    monkeypatch.setattr(fleet_module, "_GRACE_SECONDS", 0.0)
    with pytest.raises(ServerRefused, match="c: no") as caught:
        fleet(Hanging("a"), Refusing("c")).each(lambda driver: driver.step())
    assert not hasattr(caught.value, "__notes__")


@contextlib.contextmanager
def no_more_threads(prefix):
    """No thread starts whose name begins so."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def test_a_step_whose_thread_does_not_start_is_not_run(fleet, eventually):
    a, b, c = (Hanging(name, seconds=0.2) for name in "abc")
    one = fleet(a, b, c)
    ran = []

    def step(driver):
        ran.append(driver.url)
        driver.step()

    one.drivers = (a, b)
    one.each(step)
    eventually(lambda: one._callers._idle._value == 2)
    one.drivers = (a, b, c)
    ran.clear()
    with no_more_threads("streamer-http"), pytest.raises(StreamerError) as caught:
        one.each(step)
    assert str(caught.value) == (
        "c: cannot start a thread: can't start new thread; raise the limit of processes and "
        "threads (ulimit -u)"
    )
    time.sleep(0.1)
    assert sorted(ran) == ["a", "b"]


def test_servers_are_cleaned_up_though_no_thread_starts(fleet):
    one = fleet(Hanging("a"), Hanging("b"))
    done, error = [], StreamerError("the sync failed")
    with no_more_threads("streamer-http"):
        one._clean_up(error, lambda driver: done.append(driver.url))
    assert done == ["a", "b"]
    assert not hasattr(error, "__notes__")


def test_an_update_that_cannot_be_watched_is_given_up(server):
    streamer.push({"a": torch.zeros(3)}, server.url, weight_version="old")
    with streamer.connect(server.url) as session:
        with (
            no_more_threads("streamer-doubt"),
            pytest.raises(StreamerError, match=r"^the update: cannot start a thread: can't"),
        ):
            session.push({"a": torch.ones(3)})
        session.push({"a": torch.ones(3)}, weight_version="new")
    assert server.holds({"a": torch.ones(3)})
    assert (server.paused, server.weight_version) == (False, "new")


def test_an_error_of_any_kind_while_cleaning_up_does_not_hide_what_failed(fleet):
    class Broken(Hanging):
        def release(self):
            raise KeyError("its\nown")

        def leave(self):
            raise OSError("gone")

    class Released(Hanging):
        def release(self):
            return Held("is marked incomplete")

        def leave(self):
            pass

    one = fleet(Broken("a"), Released("b"))
    transport = SimpleNamespace(aborted=False)
    one.group = SimpleNamespace(flowing=False, transport=transport, left=set, close=lambda: None)
    error = StreamerError("no room")
    one.give_up(error)
    assert error.held == {"b": Held("is marked incomplete")}
    assert error.__notes__ == ["while cleaning up a: KeyError: 'its\\nown'"]
    one.close()


def test_ctrl_c_while_cleaning_up_still_tells_what_the_servers_hold(fleet):
    class Interrupted(Hanging):
        def abandon(self):
            raise KeyboardInterrupt

    class Abandoned(Hanging):
        def abandon(self):
            return Held("holds a mixture", Remedy.PUSH)

    one = fleet(Abandoned("a"), Interrupted("b"))
    transport = SimpleNamespace(aborted=False)
    one.group = SimpleNamespace(flowing=True, transport=transport, left=set, close=lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught:
        one.give_up(StreamerError("no room"))
    assert caught.value.__notes__ == [
        "a holds a mixture: push again",
        "b may hold a mixture of weights, and may be marked incomplete and paused: push again",
    ]
    one.group = None
    one.close()


def test_workers_that_have_left_are_not_asked_to(fleet):
    """They are in another trainer's group, which would lose them."""
    asked = []

    class Asked(Hanging):
        def leave(self):
            asked.append(self.url)

    one = fleet(Asked("a"), Asked("b"))
    one.group = SimpleNamespace(left=lambda: {"a"}, close=lambda: None)
    one.leave()
    assert asked == ["b"]
    one.close()


def test_a_group_may_be_dropped_while_it_is_ended():
    """`Session.cancel` on one thread, and `Session.close` on another."""

    class Dropped(Fleet):
        found = iter([SimpleNamespace(transport=SimpleNamespace(abort=lambda reason: None))])
        group = property(lambda self: next(self.found, None), lambda self, group: None)

    one = Dropped([], Options(), Clock(Timeouts()))
    one.insist()
    one.close()


@pytest.mark.parametrize("beginning", [False, True])
def test_a_wait_is_given_up_only_while_a_sync_begins(fleet, beginning, eventually):
    hanging = Hanging("a")
    one = fleet(hanging)
    transport = SimpleNamespace(abort=lambda reason: None)
    one.group = SimpleNamespace(
        while_beginning=lambda step: step() if beginning else None,
        transport=transport,
        close=lambda: None,
    )
    one.wake()
    if not beginning:
        time.sleep(0.1)
        assert not hanging.cancelled.is_set()
        one.insist()
    eventually(hanging.cancelled.is_set)
    one.group = None


def test_what_is_given_up_as_a_sync_begins_hits_nothing_that_follows(server, monkeypatch):
    """The thread that does so is late, and comes to it when the begin is through."""
    streamer.push({"a": torch.zeros(3)}, server.url, weight_version="old")
    with streamer.connect(server.url) as session:
        (driver,) = session._fleet.drivers
        cancel, begin = session._fleet.cancel, driver.begin

        def late():
            time.sleep(0.3)
            cancel()

        def begin_and_be_cancelled(version):
            begin(version)
            session.cancel()
            time.sleep(0.1)

        server.fail("/finish_weight_update", 0, delay=0.8)  # for which a release waits
        monkeypatch.setattr(session._fleet, "cancel", late)
        monkeypatch.setattr(driver, "begin", begin_and_be_cancelled)
        with pytest.raises(PushCancelled) as caught:
            session.push({"a": torch.ones(3)})
    assert caught.value.held == {}
    assert (server.paused, server.weight_version) == (False, "old")


PUSHER = """
import sys, threading, time, torch, streamer

def push():
    with streamer.connect(sys.argv[1]) as session:
        for number in range(3):
            session.push({"a": torch.full((3,), float(number))}, weight_version=f"v{number}")
            threading.main_thread().join()  # and after that
            time.sleep(0.1)

threading.Thread(target=push).start()
"""


def test_a_thread_goes_on_to_push_when_the_main_thread_has_ended(server):

    ended = subprocess.run(
        [sys.executable, "-c", PUSHER, server.url], capture_output=True, text=True, timeout=50
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert server.holds({"a": torch.full((3,), 2.0)})
    assert (server.paused, server.weight_version) == (False, "v2")


CTRL_C = """
import signal, sys, threading, torch, streamer

if sys.argv[2] == "begin":
    threading.Timer(2.0, signal.raise_signal, [signal.SIGINT]).start()
try:
    streamer.push({"a": torch.ones(3)}, sys.argv[1])
except KeyboardInterrupt as error:
    print("interrupted", *getattr(error, "__notes__", ()))
"""


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/update_weight_version", "and may yet be marked incomplete"),
        ("/pause", "but is marked incomplete: its pause may still"),
        ("/start_weight_update", "is marked incomplete and left paused: its start may still"),
    ],
)
def test_ctrl_c_does_not_wait_for_a_server_that_hangs_before_the_first_byte(server, path, says):
    streamer.push({"a": torch.zeros(3)}, server.url, weight_version="old")
    server.fail(path, delay=30, times=1)
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", CTRL_C, server.url, "begin"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.stdout.startswith(f"interrupted {server.url} holds the old weights"), ended.stderr
    assert says in ended.stdout
    assert time.monotonic() - started < 20
    # What was given up may still come, so a mark that is there stays.
    assert server.weight_version.startswith(INCOMPLETE) or not server.paused
    server.restore()
    streamer.push({"a": torch.ones(3)}, server.url, weight_version="new")
    assert (server.paused, server.weight_version) == (False, "new")
