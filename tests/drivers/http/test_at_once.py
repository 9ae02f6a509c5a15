"""Several calls at once, and to cancel them."""

from __future__ import annotations

import threading
import time

import pytest

from kit_http import in_thread
from streamer import (
    ServerRefused,
    ServerUnreachable,
)

pytestmark = pytest.mark.timeout(60)


def test_questions_do_not_wait_for_each_other(client, fake_server, reply):
    both = threading.Barrier(2, timeout=5)

    def meet(content):
        def answer(handler):
            both.wait()
            reply(content)(handler)

        return answer

    fake_server.routes["GET /one"], fake_server.routes["GET /two"] = meet({"a": 1}), meet({"b": 2})
    assert client().get_all(["/one", "/two"], 5) == [{"a": 1}, {"b": 2}]


def test_of_several_questions_the_one_that_is_refused_is_named(client, fake_server, reply):
    fake_server.routes["GET /one"] = reply({})
    fake_server.routes["GET /two"] = reply({"detail": "no"}, 500)
    one = client()
    with pytest.raises(ServerRefused, match="/two: 500 no") as caught:
        one.get_all(["/one", "/two"], 5)
    assert (caught.value.status, caught.value.path) == (500, "/two")
    assert not one._calls


def test_several_questions_can_be_cancelled(client, fake_server, reply, eventually):
    fake_server.routes["GET /one"] = fake_server.routes["GET /two"] = reply({}, delay=30)
    one = client()
    thread, errors = in_thread(lambda: one.get_all(["/one", "/two"], 60))
    eventually(lambda: len(fake_server.calls) == 2)
    one.cancel()
    thread.join(5)
    assert [type(error) for error in errors] == [ServerUnreachable]
    assert "/one: cancelled" in str(errors[0])
    assert not one._calls


def test_cancel_wakes_a_blocked_call(client, fake_server, reply, eventually):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    fake_server.routes["POST /update_weights"] = reply({}, delay=30)
    one = client()
    thread, errors = in_thread(lambda: one.post("/update_weights", {}, None))
    eventually(lambda: "/update_weights" in fake_server.posts)
    started = time.monotonic()
    one.cancel()
    thread.join(10)
    assert time.monotonic() - started < 1
    assert str(errors[0]) == f"POST {fake_server.url}/update_weights: cancelled"
    assert isinstance(errors[0], ServerUnreachable)
    assert one.get("/version", 5) == {"version": "1"}, "later calls work"


def test_cancel_wakes_every_blocked_call(client, fake_server, reply, eventually):
    fake_server.routes["POST /a"] = fake_server.routes["POST /b"] = reply({}, delay=30)
    one = client()
    calls = [in_thread(lambda path=path: one.post(path, {}, None)) for path in ("/a", "/b")]
    eventually(lambda: len(fake_server.calls) == 2)
    started = time.monotonic()
    one.cancel()
    for thread, errors in calls:
        thread.join(10)
        assert "cancelled" in str(errors[0])
    assert time.monotonic() - started < 1


def test_cancel_without_a_call_is_harmless(client, fake_server, reply):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    one = client()
    one.cancel()
    assert one.get("/version", 5) == {"version": "1"}
    one.cancel()
    assert one.get("/version", 5) == {"version": "1"}
