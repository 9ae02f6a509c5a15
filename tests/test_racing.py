"""Calls to servers beside the transport: each side ends the other, and the right error is told.

Whole syncs whose servers fail are in tests/session and tests/faults.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from streamer import (
    DeadlineExceeded,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
    TransportError,
    racing,
)
from streamer.racing import Race
from streamer.testing.loopback import LoopbackGroup

pytestmark = pytest.mark.timeout(60)
DATA = torch.zeros(8)


class Server:
    """A driver, as far as a race needs one."""

    def __init__(self, url):
        self.url = url
        self.cancelled = threading.Event()

    def cancel(self):
        self.cancelled.set()

    def hang(self):
        assert self.cancelled.wait(30)
        raise ServerUnreachable(f"{self.url}: cancelled")


def on_a_thread(driver, call):
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def servers():
    return Server("a"), Server("b")


@pytest.fixture
def group():
    """The transports of both ends: ours, and that of the one worker."""
    made = LoopbackGroup(2)
    ends = made.transport(0), made.transport(1)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def race(servers, group):
    return Race(servers, on_a_thread, group[0])


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(racing, "ANSWER_SECONDS", 0.2)


def fail(error):
    raise error


def test_both_sides_end_well(race, group):
    ours, theirs = group
    calls = [lambda: theirs.broadcast(torch.empty(8), 20), lambda: None]
    with race.beside("the update", calls, 20, untaken=20):
        ours.broadcast(DATA, 20)
    assert not ours.aborted


def test_a_call_that_fails_ends_the_block_and_is_told(race, group, servers):
    ours, _ = group
    refusal = ServerRefused("a: no room", 500)
    with (
        pytest.raises(ServerRefused, match="no room") as caught,
        race.beside("the update", [lambda: fail(refusal), servers[1].hang], 20),
    ):
        ours.broadcast(DATA, 20)
    assert isinstance(caught.value.__cause__, TransportError)
    assert ours.aborted
    assert servers[1].cancelled.is_set()


def test_a_call_that_fails_after_the_block_is_told(race, group):
    refusal = ServerRefused("a: no room", 500)
    went_on = threading.Event()

    def late():
        assert went_on.wait(20)
        raise refusal

    with (
        pytest.raises(ServerRefused, match="no room"),
        race.beside("the update", [late, lambda: None], 20),
    ):
        went_on.set()
    assert group[0].aborted


def test_the_server_that_is_gone_is_told_before_those_that_say_so(race, group):
    calls = [
        lambda: fail(ServerRefused("a: a worker has left", 500)),
        lambda: fail(ServerUnreachable("b: it broke")),
    ]
    ours, _ = group
    with pytest.raises(ServerUnreachable, match="b: it broke"), race.beside("the join", calls, 20):
        ours.connect(20)


def test_a_block_that_fails_names_the_servers_that_are_silent(race, servers, soon):
    calls = [servers[0].hang, lambda: None]
    with (
        pytest.raises(TransportError, match=r"^a did not answer the join: nobody came$"),
        race.beside("the join", calls, 20),
    ):
        raise TransportError("nobody came")
    assert servers[0].cancelled.is_set()


def test_an_error_of_another_kind_is_told_as_it_is(race, servers, group):
    with pytest.raises(KeyboardInterrupt), race.beside("the join", [s.hang for s in servers], 20):
        raise KeyboardInterrupt
    assert all(server.cancelled.is_set() for server in servers)
    assert group[0].aborted


def test_servers_that_do_not_answer_after_the_block_are_given_up(race, servers, soon):
    with (
        pytest.raises(DeadlineExceeded, match=r"^a, b did not answer the update: .*for 0.1 s$"),
        race.beside("the update", [server.hang for server in servers], 0.1),
    ):
        pass


def test_bytes_that_nobody_takes_end_the_block(race, group):
    ours, _ = group
    with (
        pytest.raises(TransportError, match=r"every server has answered the update, but 0.1 s"),
        race.beside("the update", [lambda: None, lambda: None], 20, untaken=0.1),
    ):
        ours.broadcast(DATA, 20)


def test_a_call_that_cannot_be_cancelled_is_noted(race, monkeypatch):
    monkeypatch.setattr(Race, "_cancel", lambda *_: False)
    refusal = ServerRefused("a: no room", 500)
    with (
        pytest.raises(ServerRefused, match="no room") as caught,
        race.beside("the update", [lambda: fail(refusal), lambda: None], 20),
    ):
        raise TransportError("broken")
    assert caught.value.__notes__ == ["a call to a server could not be cancelled within 5 s"]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_call_that_was_never_begun_ends_the_others(servers, group, failing):
    def submit(driver, call):
        if driver.url != failing:
            return on_a_thread(driver, call)
        future = Future()
        future.set_exception(StreamerError(f"{driver.url}: cannot start a thread"))
        return future

    race = Race(servers, submit, group[0])
    calls = [server.hang for server in servers]
    with (
        pytest.raises(StreamerError, match=rf"^{failing}: cannot start a thread$"),
        race.beside("the update", calls, 20),
    ):
        group[0].broadcast(DATA, 20)
    assert all(server.cancelled.is_set() for server in servers)


def test_calls_whose_doubt_cannot_be_watched_are_given_up(race, servers, group, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "streamer-doubt":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    entered = []
    with (
        pytest.raises(StreamerError, match=r"^the update: cannot start a thread: can't start"),
        race.beside("the update", [server.hang for server in servers], 20, untaken=5),
    ):
        entered.append(1)
    assert entered == []
    assert group[0].aborted
    assert all(server.cancelled.is_set() for server in servers)
