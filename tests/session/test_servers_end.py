"""Servers and their workers are replaced, killed and stopped."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kit_checks import all_told
from kit_session import JOIN, UPDATE, weights
from streamer import (
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
    Timeouts,
    TransportError,
)
from streamer.drivers.vllm import VllmDriver

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("workers", [2, 1], ids=["same", "fewer workers"])
def test_a_server_that_was_replaced_is_noticed(start_server, session, push, workers):
    """Case 4: a fresh process at the same URL, before any broadcast."""
    server = start_server(2)
    one = session(server)
    push(one, [server], weights(1))
    server.kill()
    server.workers = workers
    server.start()
    server.heal()
    report = push(one, [server], weights(2))
    assert server.calls.count(JOIN) == 1
    assert server.calls.count(UPDATE) == 1
    assert report.servers[0].world_size == workers


def test_a_server_that_was_replaced_before_the_first_push_is_noticed(start_server, session, push):
    """It says the same of itself as the one before it: only its workers are others."""
    server = start_server(2)
    one = session(server)
    server.kill()
    server.start()
    server.heal()
    push(one, [server], weights(1))
    assert server.calls.count(JOIN) == 1
    assert server.calls.count(UPDATE) == 1


def test_a_worker_that_was_killed_between_pushes_is_noticed(
    start_server, session, push, make_source
):
    """Nothing is changed on any server: the old weights go on being served."""
    server = start_server(2)
    one = session(server)
    push(one, [server], weights(1), weight_version="old")
    os.kill(server.pids[1], signal.SIGKILL)
    server.heal()
    with pytest.raises(ServerRefused, match="worker 1 has died: restart the server"):
        one.push(make_source(weights(2)))
    assert not [call for call in server.calls if call in (UPDATE, "POST /pause")]
    assert server.weight_version == "old"
    assert not server.paused


def test_a_worker_that_does_not_answer_is_not_waited_for_without_end(
    start_server, session, push, make_source
):
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=2, progress=2))
    push(one, [server], weights(1), weight_version="old")
    os.kill(server.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"of 2 workers, .* joined"):
        one.push(make_source(weights(2)))
    assert time.monotonic() - started < 25  # 12 on a machine that does nothing else
    assert server.weight_version == "old"
    assert not server.paused
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


def test_to_see_that_all_are_there_takes_no_time(session, server, make_source):
    """The workers answer while the servers are asked."""
    one = session(server)
    source = make_source(weights(1))
    seconds = []
    for _ in range(10):
        one.push(source)
        one._fleet.group.call_roll()
        time.sleep(0.01)  # as long as a server takes to answer
        started = time.perf_counter()
        assert one._fleet.group.is_whole(lambda: None)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3


def test_the_connect_timeout_is_the_workers_too(session, server, monkeypatch):
    seen = []
    join = VllmDriver.join

    def spy(self, info):
        seen.append(info.rendezvous["join_seconds"])
        join(self, info)

    monkeypatch.setattr(VllmDriver, "join", spy)
    session(server, timeouts=Timeouts(connect=87, progress=20))
    assert 87 < seen[0] < 97


def test_a_server_that_is_killed_while_it_receives(start_server, session, push, make_source):
    server = start_server(1)
    one = session(server)
    push(one, [server], weights(1))

    def kill(index):
        if index == 8:
            server.kill()

    started = time.monotonic()
    with pytest.raises(StreamerError) as caught:
        one.push(make_source(weights(2, count=40, size=50_000), on_step=kill))
    assert time.monotonic() - started < 20
    assert isinstance(caught.value, (ServerError, TransportError))
    assert server.url in str(caught.value)
    with pytest.raises(ServerUnreachable):
        one.push(make_source(weights(2)))
    server.start()
    push(one, [server], weights(3))


def test_a_worker_that_is_killed_while_it_receives(start_server, session, make_source):
    server = start_server(2)
    one = session(server)

    def kill(index):
        if index == 8:
            os.kill(server.pids[0], signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(StreamerError) as caught:
        one.push(make_source(weights(2, count=40, size=50_000), on_step=kill))
    assert time.monotonic() - started < 20
    # One remedy, whoever tells it: not also "push again".
    assert all_told(caught.value) == {
        server.url: "holds a mixture of weights and has lost a worker (/health: 503): restart it"
    }


def test_a_worker_that_hangs_does_not_take_the_others_along(
    start_server, session, push, make_source
):
    """Gloo cannot cancel what is stuck; the other workers must hear of the end all the same."""
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=10, progress=2))
    push(one, [server], weights(1))

    def stop(index):
        if index == 8:
            os.kill(server.pids[1], signal.SIGSTOP)

    with pytest.raises(StreamerError):
        one.push(make_source(weights(2, count=40, size=50_000), on_step=stop))
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


def test_the_limit_of_a_whole_push_ends_a_broadcast_too(start_server, session, push, make_source):
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=10, progress=60, total=3))
    push(one, [server], weights(1))

    def stop(index):
        if index == 8:
            os.kill(server.pids[1], signal.SIGSTOP)

    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^the push took .* limit of 3 s;"):
        one.push(make_source(weights(2, count=40, size=50_000), on_step=stop))
    assert time.monotonic() - started < 12
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


def test_a_group_that_was_aborted_is_joined_anew(session, server, push):
    """As after a second signal, which may come while the first one is tidied up behind."""
    one = session(server)
    push(one, [server], weights(1))
    one._fleet.insist()
    push(one, [server], weights(2))
