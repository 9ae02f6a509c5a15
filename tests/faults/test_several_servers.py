"""Three servers, four workers, one group: all of them or none, as far as the protocol allows."""

from __future__ import annotations

import os
import signal
import time

import pytest

import streamer
from fault_plot import BUFFER_SIZE, CALL_SIZE, Watched, weights
from fault_proxy import Fault, FaultProxy
from fault_table import CALLS, UPDATE
from kit_checks import all_told
from streamer import DeadlineExceeded, ServerRefused, ServerUnreachable, Timeouts
from streamer import session as session_module
from streamer.drivers import recovery
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(90)

OLD, NEW, NEXT = weights(1), weights(2), weights(3)
MIXTURE = "holds a mixture of old and new weights, is marked incomplete and left paused: push again"
BEGIN = ["/is_paused", "/pause", "/update_weight_version", "/start_weight_update"]


@pytest.fixture(scope="module")
def _third(_shared_server):
    third = type(_shared_server)(1)
    third.start()
    yield third
    third.kill()


@pytest.fixture
def servers(server, other_server, _third, monkeypatch):
    """Three of them; what is pushed is cut into several calls."""
    plain = session_module.make_plan
    monkeypatch.setattr(
        session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=CALL_SIZE)
    )
    _third.restore()
    return [server, other_server, _third]


@pytest.fixture
def proxies(servers):
    """One in front of each."""
    made = [FaultProxy(server.url) for server in servers]
    yield made
    for one in made:
        one.stop()
    for server in servers:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGCONT)


@pytest.fixture
def session(proxies, make_source):
    """Connected to all three, which hold the old weights."""
    urls = [proxy.url for proxy in proxies]
    timeouts = Timeouts(connect=20, progress=20)
    with streamer.connect(urls, timeouts=timeouts, buffer_size=BUFFER_SIZE) as session:
        session.push(make_source(OLD), weight_version="old")
        yield session


def all_hold(servers, tensors, version):
    return [
        (server.holds(tensors), server.paused, server.weight_version) for server in servers
    ] == [(True, False, version)] * len(servers)


def cure(session, servers, proxies, make_source):
    """The next sync, into all of them."""
    for proxy in proxies:
        proxy.heal()
    session.push(make_source(NEXT), weight_version="next")
    assert all_hold(servers, NEXT, "next")


@pytest.mark.parametrize("which", range(3))
def test_no_byte_moves_before_all_have_started(session, servers, proxies, make_source, which):
    begun: list[bool] = []

    def act():
        time.sleep(0.3)
        begun.append(any(f"POST {UPDATE}" in proxy.calls for proxy in proxies))

    for proxy in proxies:
        proxy.inject(Fault("/never"))
    proxies[which].inject(Fault("/start_weight_update", act=act))
    session.push(make_source(NEW), weight_version="new")
    assert begun == [False]
    assert [proxy.calls.count(f"POST {UPDATE}") for proxy in proxies] == [CALLS] * 3
    assert all_hold(servers, NEW, "new")


@pytest.mark.parametrize("path", BEGIN)
@pytest.mark.parametrize("which", range(3))
def test_if_one_refuses_to_begin_all_serve_the_old_weights(
    session, servers, proxies, make_source, path, which
):
    for proxy in proxies:
        proxy.inject(Fault("/never"))
    proxies[which].inject(Fault(path, how="500", asked="never"))
    with pytest.raises(ServerRefused, match=f"{proxies[which].url}{path}: 500") as caught:
        session.push(make_source(NEW))
    assert caught.value.held == {}
    assert not any(f"POST {UPDATE}" in proxy.calls for proxy in proxies)
    assert all_hold(servers, OLD, "old")
    cure(session, servers, proxies, make_source)


@pytest.mark.parametrize("path", ["/version", "/server_info", "/init_weight_transfer_engine"])
def test_if_one_cannot_be_joined_nothing_has_changed(session, servers, proxies, make_source, path):
    proxies[1].inject(Fault(path, how="500", asked="never"))
    started = time.monotonic()
    with pytest.raises(ServerRefused, match=f"{proxies[1].url}{path}: 500"):
        streamer.push(make_source(NEW), [proxy.url for proxy in proxies])
    assert time.monotonic() - started < 10
    assert all_hold(servers, OLD, "old")
    cure(session, servers, proxies, make_source)


@pytest.mark.parametrize("nth", range(1, CALLS + 1))
@pytest.mark.parametrize("which", range(3))
def test_if_one_fails_while_it_receives_each_says_what_it_holds(
    session, servers, proxies, make_source, nth, which
):
    proxies[which].inject(Fault(UPDATE, nth, how="500", asked="never"))
    with pytest.raises(ServerRefused, match=f"{proxies[which].url}{UPDATE}: 500") as caught:
        session.push(make_source(NEW), weight_version="new")
    assert all_told(caught.value) == {proxy.url: MIXTURE for proxy in proxies}
    for server in servers:
        assert server.paused
        assert server.weight_version.startswith(f"{INCOMPLETE}new#")
    cure(session, servers, proxies, make_source)


def test_if_one_dies_while_it_receives_it_alone_has_to_be_restarted(
    session, servers, proxies, make_source
):
    source = Watched(make_source(NEW))

    def kill(index):
        if index == 14:
            servers[1].kill()

    source.on_step = kill
    with pytest.raises(ServerUnreachable, match=proxies[1].url) as caught:
        session.push(source)
    held = all_told(caught.value)
    assert held[proxies[1].url].endswith("restart it")
    assert held[proxies[0].url] == held[proxies[2].url] == MIXTURE
    servers[1].start()
    cure(session, servers, proxies, make_source)


def test_if_one_is_stopped_the_others_are_not_left_in_the_broadcast(
    servers, proxies, make_source, monkeypatch
):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 1.0)
    timeouts = Timeouts(connect=10, progress=2)
    urls = [proxy.url for proxy in proxies]
    with streamer.connect(urls, timeouts=timeouts, buffer_size=BUFFER_SIZE) as session:
        stopped = servers[1]
        fault = Fault(UPDATE, 2, act=lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids])
        pids = [stopped.process.pid, *stopped.pids]
        proxies[1].inject(fault)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=f"{urls[1]}.* did not answer") as caught:
            session.push(make_source(NEW))
        assert time.monotonic() - started < 15
        held = all_told(caught.value)
        assert held[urls[1]].endswith("restart it")
        assert held[urls[0]] == held[urls[2]] == MIXTURE
        assert servers[0].checksums()
        assert servers[2].checksums()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        cure(session, servers, proxies, make_source)


def test_if_one_refuses_to_finish_the_others_hold_the_new_weights(
    session, servers, proxies, make_source
):
    proxies[2].inject(Fault("/finish_weight_update", how="500", asked="never"))
    with pytest.raises(ServerRefused, match="/finish_weight_update: 500") as caught:
        session.push(make_source(NEW), weight_version="new")
    urls = [proxy.url for proxy in proxies]
    new = "holds the new weights"
    assert all_told(caught.value) == {urls[0]: new, urls[1]: new, urls[2]: MIXTURE}
    assert all_hold(servers[:2], NEW, "new")
    assert servers[2].paused
    cure(session, servers, proxies, make_source)
