"""The server fails: refuses, or does not answer in time."""

from __future__ import annotations

import time

import pytest
import torch

import streamer
from kit_checks import all_told, both_modes
from kit_session import JOIN, MIXTURE, UPDATE, weights
from streamer import DeadlineExceeded, ServerRefused, Timeouts
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("where", ["/is_paused", "/pause", "/update_weight_version",
                                   "/start_weight_update"])  # fmt: skip
def test_a_begin_that_is_refused_leaves_the_old_weights_serving(
    session, server, push, make_source, where
):
    one = session(server)
    push(one, [server], weights(1), weight_version="before")
    server.fail(where, 500, "not now")
    with pytest.raises(ServerRefused, match=f"{where}: 500 not now") as caught:
        one.push(make_source(weights(2)))
    assert caught.value.held == {}
    server.heal()
    assert (server.weight_version, server.paused) == ("before", False)
    assert server.holds(weights(1))
    push(one, [server], weights(3))


def test_of_two_servers_one_refuses_to_begin(session, server, other_server, push, make_source):
    one = session(server, other_server)
    push(one, [server, other_server], weights(1), weight_version="before")
    other_server.fail("/start_weight_update", 500, "not now")
    with pytest.raises(ServerRefused, match=other_server.url):
        one.push(make_source(weights(2)))
    other_server.heal()
    for each in (server, other_server):
        assert (each.weight_version, each.paused) == ("before", False)
        assert each.holds(weights(1))
    push(one, [server, other_server], weights(3))


@both_modes
@pytest.mark.parametrize("inside", [False, True], ids=["instead", "while receiving"])
def test_an_update_that_is_refused_is_told_within_seconds(
    session, server, push, make_source, packed, inside
):
    """Cases 1, 3 and 6."""
    one = session(server, packed=packed)
    push(one, [server], weights(1))
    big = weights(2, count=40, size=50_000)
    server.fail("/update_weights", 500, "CUDA out of memory", delay=0.3, inside=inside)
    started = time.monotonic()
    with pytest.raises(ServerRefused) as caught:
        one.push(
            make_source(big, on_step=lambda index: time.sleep(0.05 if inside else 0)),
            weight_version="v2",
        )
    assert time.monotonic() - started < 15
    assert f"POST {server.url}/update_weights: 500 CUDA out of memory" in str(caught.value)
    assert caught.value.status == 500
    assert all_told(caught.value) == {server.url: MIXTURE}
    notes = getattr(caught.value, "__notes__", [])
    assert notes == [], "workers that wait for the trainer cannot answer before it has left"
    assert server.calls.count(UPDATE) == 1
    assert server.weight_version.startswith(f"{INCOMPLETE}v2#")
    assert server.paused
    server.heal()
    push(one, [server], weights(3))


def test_a_server_whose_finish_waits_for_its_workers_is_not_given_up(
    session, server, push, make_source
):
    """A vLLM server asks every worker; those that wait for the trainer answer once it leaves."""
    one = session(server)
    push(one, [server], weights(1))
    server.fail("/update_weights", 500, "no", delay=0.3, inside=True)
    server.fail("/finish_weight_update", 0, workers=True, keep=True)
    big = weights(2, count=40, size=50_000)
    with pytest.raises(ServerRefused) as caught:
        one.push(make_source(big, on_step=lambda index: time.sleep(0.05)))
    assert all_told(caught.value) == {server.url: MIXTURE}
    server.heal()
    push(one, [server], weights(3))


def test_the_same_between_two_servers(session, server, other_server, push, make_source):
    """Whichever fails first ends the other: no server is left inside a broadcast."""
    one = session(server, other_server)
    push(one, [server, other_server], weights(1))
    other_server.fail("/update_weights", 500, "no", delay=0.3)
    big = weights(2, count=40, size=50_000)
    started = time.monotonic()
    with pytest.raises(ServerRefused, match=f"{other_server.url}/update_weights: 500 no") as got:
        one.push(make_source(big))
    assert time.monotonic() - started < 15
    assert set(got.value.held) == {server.url, other_server.url}
    assert all("mixture" in state for state in all_told(got.value).values())
    other_server.heal()
    push(one, [server, other_server], weights(3))


@pytest.mark.parametrize("where", ["/finish_weight_update", "/reset_prefix_cache", "/resume"])
def test_a_commit_that_is_refused(session, server, push, make_source, where):
    one = session(server)
    push(one, [server], weights(1))
    server.fail(where, 500, "no", times=2 if where == "/resume" else 1)
    with pytest.raises(ServerRefused, match=f"{where}: 500 no") as caught:
        one.push(make_source(weights(2)), weight_version="v2")
    (held,) = all_told(caught.value).values()
    what = "the new weights, but"
    if where == "/finish_weight_update":
        what = "a mixture of old and new weights,"
    assert held == f"holds {what} is marked incomplete and left paused: push again"
    assert server.weight_version.startswith(f"{INCOMPLETE}v2#")
    assert server.paused
    server.heal()
    push(one, [server], weights(3), weight_version="v3")


def test_an_init_that_is_refused(server, session, push):
    """Case 2."""
    server.fail("/init_weight_transfer_engine", 500, "no weight transfer engine")
    started = time.monotonic()
    with pytest.raises(ServerRefused) as caught:
        session(server)
    assert time.monotonic() - started < 10
    assert str(caught.value) == (
        f"POST {server.url}/init_weight_transfer_engine: 500 no weight transfer engine"
    )
    server.heal()
    push(session(server), [server], weights(1))


def test_workers_that_never_join_are_named(server, session, push):
    """Case 2: address, world size, and what did not come."""
    server.fail("/init_weight_transfer_engine", 200, delay=60)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        session(server, timeouts=Timeouts(connect=2, progress=20))
    assert 1.5 < time.monotonic() - started < 10
    text = str(caught.value)
    assert "of 2 workers, ranks [1, 2] have not joined 127.0.0.1:" in text
    assert "2 s" in text
    server.heal()
    push(session(server), [server], weights(1))


def test_an_update_that_is_not_answered_ends_at_the_deadline(session, server, push, make_source):
    """Case 5: it names the server, the endpoint and the time."""
    one = session(server, timeouts=Timeouts(connect=30, progress=2))
    push(one, [server], weights(1))
    server.fail("/update_weights", 200, delay=30, inside=True)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        one.push(make_source(weights(2)))
    assert 1.5 < time.monotonic() - started < 15
    assert server.url in str(caught.value.args[0])
    assert "update" in str(caught.value.args[0])
    assert "2 s" in str(caught.value)
    server.heal()
    push(one, [server], weights(3))


def test_a_slow_server_is_no_failure(session, server, push):
    """Case 5: 3 s in an endpoint, with a timeout of 20 s."""
    one = session(server)
    server.fail("/start_weight_update", 0, delay=3)
    push(one, [server], weights(1))


def test_a_push_has_a_limit(session, server, push, make_source):
    """It holds while bytes flow as well, and the stream is completed: no worker hangs."""
    one = session(server, timeouts=Timeouts(connect=30, progress=20, total=2))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="longer than its limit of 2 s"):
        one.push(make_source(weights(1, count=80), on_step=lambda index: time.sleep(0.1)))
    assert 1.5 < time.monotonic() - started < 8
    server.heal()
    push(one, [server], weights(2))
    assert JOIN not in server.calls


def test_the_limit_is_told_where_a_read_was_waited_for(server, make_source, deferred):
    slow = deferred(torch.zeros(5), lambda start, stop: time.sleep(6))
    source = make_source({"a": slow})
    with pytest.raises(DeadlineExceeded, match=r"^the push took longer than its limit of 3 s;"):
        streamer.push(source, server.url, timeouts=Timeouts(total=3))


@pytest.mark.parametrize(
    "where",
    ["/version", "/init_weight_transfer_engine", "/pause", "/update_weights",
     "/finish_weight_update"],
)  # fmt: skip
def test_the_limit_is_told_whatever_waited_when_it_ran_out(server, where):
    """And nobody is blamed, where nothing was wrong but the time."""
    server.fail(where, 0, delay=6)
    options = {"timeouts": Timeouts(total=3), "weight_version": "after"}
    with pytest.raises(DeadlineExceeded) as caught:
        streamer.push(weights(1), server.url, **options)
    assert caught.value.args == ("the push took longer than its limit of 3 s",)
    began = where not in ("/version", "/init_weight_transfer_engine")
    assert (server.url in caught.value.held) is began
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
