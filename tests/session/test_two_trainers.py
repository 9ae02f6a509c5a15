"""Two trainers push to one server at the same time: the first one in is not disturbed."""

from __future__ import annotations

import threading

import pytest

from kit_session import JOIN, weights
from streamer import ServerRefused, sync
from streamer import session as session_module
from streamer.receiver import OCCUPIED

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def many_calls(monkeypatch):
    """A push makes a call for every few tensors, between which others get their turn."""
    plain = session_module.make_plan
    monkeypatch.setattr(session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=4000))


def test_who_comes_in_the_middle_of_a_sync_is_not_let_in(
    session, server, make_source, many_calls, eventually
):
    first, errors = session(server), []
    source = make_source(weights(1))

    def second():
        try:
            session(server)
        except ServerRefused as error:
            errors.append(str(error))

    slow = threading.Event()

    def on_step(index):
        if index == 7:
            threading.Thread(target=second, daemon=True).start()
            eventually(lambda: server.calls.count(JOIN) == 2)
        if index > 7:
            slow.wait(0.5)  # what asks whether a sync is under way waits for two beats

    source.on_step = on_step
    report = first.push(source)
    eventually(lambda: errors)
    assert OCCUPIED in errors[0]
    assert server.holds(weights(1))
    assert (server.paused, server.weight_version) == (False, report.weight_version)
    second_push = session(server).push(make_source(weights(2)))
    assert server.weight_version == second_push.weight_version


def test_to_leave_does_not_take_the_workers_of_another(session, server, make_source, monkeypatch):
    """They have joined it since, and it has not begun to push: nothing else tells that."""
    first, other = session(server), session(server)
    begin = sync.Sync._update

    def close_first(*arguments):
        first.close()
        return begin(*arguments)

    monkeypatch.setattr(sync.Sync, "_update", close_first)
    other.push(make_source(weights(1)))
    assert server.holds(weights(1))
    assert not server.paused
