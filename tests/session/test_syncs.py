"""What goes well: whole syncs into real reference servers."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import streamer
from kit_checks import both_modes
from kit_session import JOIN, TIMEOUTS, UPDATE, weights
from streamer import ServerRefused, TensorSpec, UsageError
from streamer import session as session_module

pytestmark = pytest.mark.timeout(120)


@both_modes
def test_weights_arrive_in_every_worker(session, server, push, packed):
    one = session(server, packed=packed)
    tensors = weights(1)
    report = push(one, [server], tensors, weight_version="step-1")
    assert report.tensors == len(tensors)
    assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.chunks > 3
    assert report.weight_version == "step-1"
    (info,) = report.servers
    assert (info.url, info.world_size) == (server.url, 2)
    assert info.version.startswith("0.33.0")
    seconds = report.seconds
    assert seconds.open + seconds.connect + seconds.update + seconds.finish == pytest.approx(
        seconds.total, abs=0.01
    )
    assert report.gb_per_s > 0
    assert report.as_json()["weight_version"] == "step-1"


@both_modes
def test_several_syncs_join_once(session, server, push, packed):
    one = session(server, packed=packed)
    server.heal()
    for step in range(3):
        push(one, [server], weights(step), weight_version=f"step-{step}")
    assert JOIN not in server.calls
    assert server.calls.count(UPDATE) == 3


def test_deferred_tensors_arrive(session, server, push, make_source, deferred):
    tensors = weights(7)
    session(server).push(make_source({n: deferred(t) for n, t in tensors.items()}))
    assert server.holds(tensors)


def test_the_specs_of_a_source_may_be_any_sequence(session, server, make_source):
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    declared = tuple(TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    session(server).push(make_source(tensors, declared))
    assert server.holds(tensors)


def test_two_servers_are_one_group(session, server, other_server, push):
    """Three workers, and each byte is sent once."""
    one = session(server, other_server)
    for step in (1, 2):
        report = push(one, [server, other_server], weights(step))
    assert [(item.url, item.world_size) for item in report.servers] == [
        (server.url, 2),
        (other_server.url, 1),
    ]


def test_push_connects_and_disconnects(server, make_source):
    tensors = weights(3)
    report = streamer.push(
        make_source(tensors), server.url, timeouts=TIMEOUTS, weight_version="once"
    )
    assert server.calls[-1] == "POST /shutdown_weight_transfer_engine"
    assert report.weight_version == "once"
    assert server.holds(tensors)


def test_sessions_one_after_another_and_in_turns(session, server, push):
    """Another trainer's sync in between is noticed, and the group is joined anew."""
    first = session(server)
    push(first, [server], weights(1))
    second = session(server)
    push(second, [server], weights(2))
    push(first, [server], weights(3))
    push(second, [server], weights(4))
    first.close()
    second.close()
    push(session(server), [server], weights(5))


@pytest.mark.parametrize("how", ["joins", "is refused"])
def test_another_trainer_that_has_only_connected_is_noticed(
    session, server, other_server, push, how
):
    """The weights are what they were, but the workers have left the group."""
    first = session(server, other_server)
    push(first, [server, other_server], weights(1))
    if how == "joins":
        session(other_server)
    else:
        other_server.fail("/init_weight_transfer_engine", 500, "no")
        with pytest.raises(ServerRefused):
            session(server, other_server)
        other_server.heal()
    push(first, [server, other_server], weights(2))


def test_a_model_larger_than_a_call_is_sent_in_several(session, server, push, monkeypatch):
    plain = session_module.make_plan
    monkeypatch.setattr(session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=4000))
    one = session(server)
    server.heal()
    push(one, [server], weights(1))
    assert server.calls.count(UPDATE) > 2
    assert server.calls.count("POST /start_weight_update") == 1


def test_close_is_idempotent_and_ends_the_membership(session, server):
    one = session(server)
    server.heal()
    one.close()
    one.close()
    assert server.calls == ["GET /weight_info", "POST /shutdown_weight_transfer_engine"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("streamer")]


def test_a_push_within_a_push_is_refused(session, server, make_source):
    inner: list[BaseException] = []

    def again(event):
        try:
            one.push(make_source(weights(2)))
        except UsageError as error:
            inner.append(error)

    one = session(server, on_event=again)
    one.push(make_source(weights(1)))
    assert "a push of this session is under way" in str(inner[0])
    assert one.push(make_source(weights(2))).tensors


def test_a_session_does_not_outlive_a_fork(session, server, make_source):
    one = session(server)
    child = os.fork()
    if child == 0:
        try:
            one.push(make_source(weights(1)))
        except UsageError as error:
            one.close()
            os._exit(7 if "before a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.push(make_source(weights(1)))


def test_a_closed_session_says_so(session, server, make_source):
    one = session(server)
    one.close()
    with pytest.raises(UsageError, match="closed"):
        one.push(make_source(weights(1)))


# Joining.


def test_a_closed_session_does_not_join(session, server):
    one = session(server)
    one.close()
    with pytest.raises(UsageError, match="the session is closed"):
        one.join()


def test_joining_waits_for_no_push(session, server, make_source):
    one = session(server)
    errors = []

    def on_step(index):
        if index == 1:
            with pytest.raises(UsageError, match="a push of this session is under way") as caught:
                one.join()
            errors.append(caught.value)

    one.push(make_source(weights(1), on_step=on_step))
    assert len(errors) == 1
    assert server.holds(weights(1))
