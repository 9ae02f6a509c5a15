"""Deadlines and cancelling."""

from __future__ import annotations

import re
import threading
import time

import pytest

from kit_checks import told
from kit_fake_vllm import call_of
from streamer import DeadlineExceeded, ServerUnreachable, Timeouts
from streamer.drivers import recovery

pytestmark = pytest.mark.timeout(60)

EVERY = [
    ("/version", lambda one: one.probe()),
    ("/get_world_size", lambda one: one.probe()),
    ("/server_info", lambda one: one.probe()),
    ("/weight_info", lambda one: one.probe()),
    ("/is_paused", lambda one: one.begin("v2")),
    ("/pause", lambda one: one.begin("v2")),
    ("/update_weight_version", lambda one: one.begin("v2")),
    ("/start_weight_update", lambda one: one.begin("v2")),
    ("/finish_weight_update", lambda one: (one.begin("v2"), one.commit("v2"))),
    ("/reset_prefix_cache", lambda one: (one.begin("v2"), one.commit("v2"))),
    ("/resume", lambda one: (one.begin("v2"), one.commit("v2"))),
]


@pytest.mark.parametrize(("path", "use"), EVERY, ids=[path for path, _ in EVERY])
def test_one_setting_is_obeyed_by_every_endpoint(driver, vllm, path, use):
    """Case 5: a server that sleeps longer in any of them."""
    timeouts = Timeouts(connect=0.4, progress=0.4)
    one = driver(timeouts, probe=path in ("/version", "/get_world_size"))
    one.probe()
    vllm.delay(path, 2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        use(one)
    assert 0.3 < time.monotonic() - started < 5
    assert re.search(rf"{vllm.fake.url}{path}: no answer after 0\.\d+ s", str(caught.value))


def test_an_update_has_no_deadline_of_its_own_and_can_be_cancelled(driver, vllm, eventually):
    """It lasts as long as the bytes flow: the broadcast watches the time."""
    one = driver(Timeouts(connect=0.4, progress=0.4))
    one.begin("v2")
    vllm.delay("/update_weights", 30)
    errors = []

    def update():
        try:
            one.update(call_of())
        except ServerUnreachable as error:
            errors.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    eventually(lambda: "/update_weights" in vllm.fake.posts)
    time.sleep(0.8)
    assert thread.is_alive()
    started = time.monotonic()
    one.cancel()
    thread.join(10)
    assert time.monotonic() - started < 1
    assert "/update_weights: cancelled" in str(errors[0])
    assert vllm.fake.posts.count("/update_weights") == 1


def test_a_clean_up_has_a_short_deadline(driver, vllm, monkeypatch):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.3)
    one = driver(Timeouts(60, 60))
    one.begin("v2")
    vllm.delay("/", 5)
    started = time.monotonic()
    said = told(one.abandon())
    assert time.monotonic() - started < 3
    assert "does not answer" in said
