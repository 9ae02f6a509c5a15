"""A sync that goes well: the order of calls, and their bodies."""

from __future__ import annotations

import threading

import pytest

from kit_fake_vllm import MARK, PAUSE, RESET, call_of, steps, sync
from streamer import ServerRefused
from streamer.drivers import claim
from streamer.drivers.base import JoinInfo

pytestmark = pytest.mark.timeout(60)


def test_the_order_of_calls(driver, vllm):
    """Between start and finish a request would kill the engine: pause first, resume last."""
    one = driver()
    one.begin("v2")
    assert vllm.serves == (MARK, True, True)
    one.update(call_of())
    one.update(call_of())
    one.commit("v2")
    assert steps(vllm) == [
        f"/update_weight_version {MARK}",
        PAUSE,
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        RESET,
        "/finish_weight_update None",
        "/update_weight_version v2",
        "/resume",
    ]
    assert vllm.serves == ("v2", False, False)
    assert one.is_ours()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_the_mode_of_pausing(driver, vllm, mode):
    one = driver(pause=mode)
    one.begin("v2")
    assert steps(vllm)[1] == f"/pause?mode={mode}"


def test_a_push_again_asks_two_things_at_once(driver, vllm):
    one = driver()
    both = threading.Barrier(2, timeout=5)
    for route in ("GET /weight_info", "GET /is_paused"):

        def answer(handler, usual=vllm.fake.routes[route]):
            both.wait()
            usual(handler)

        vllm.fake.routes[route] = answer
    assert one.is_ours()
    one.begin("v2")
    assert vllm.fake.paths.count("GET /is_paused") == 1, "it was known already"


@pytest.mark.parametrize("before", [False, True])
def test_what_was_said_a_while_ago_is_asked_again(driver, vllm, monkeypatch, before):
    one = driver()
    vllm.paused = before
    assert one.is_ours()
    vllm.paused = not before  # by its user, while other servers were asked
    monkeypatch.setattr(claim, "_FRESH", 0.0)
    one.begin("v2")
    one.update(call_of())
    one.commit("v2")
    assert vllm.paused is not before, "as its user had it"


def test_pausing_can_be_left_to_the_caller(driver, vllm):
    one = driver(pause="none")
    vllm.paused = True
    sync(one, "v2")
    assert not [step for step in steps(vllm) if "pause" in step or "resume" in step]
    assert vllm.paused


@pytest.mark.parametrize("paused", [False, True])
def test_a_server_that_goes_on_generating_is_reset_after_the_finish(driver, vllm, paused):
    """Up to then it computes keys and values of a mixture."""
    vllm.paused = paused
    sync(driver(pause="none"), "v2")
    ends = [RESET, "/finish_weight_update None"]
    assert steps(vllm)[-3:] == [*(ends if paused else ends[::-1]), "/update_weight_version v2"]


def test_a_server_that_was_paused_stays_paused(driver, vllm):
    vllm.paused = True
    one = driver()
    sync(one, "v2")
    assert "/resume" not in steps(vllm)
    assert vllm.serves == ("v2", True, False)


def test_the_body_of_an_update(driver, vllm):
    """Strict: an unknown key is a 500, so ``chunk_sizes`` goes to our own engine alone."""
    one = driver()
    one.begin("v2")
    one.update(call_of())
    assert vllm.fake.calls[-1].body == {
        "update_info": {
            "names": ["scale", "w"],
            "dtype_names": ["float32", "bfloat16"],
            "shapes": [[], [2, 3]],
        }
    }


@pytest.mark.parametrize(
    ("backend", "version", "reused"),
    [("nccl", "0.33.0", True), ("nccl", "0.32.1", False), ("streamer", "0.32.0", True)],
)
def test_metadata_that_the_workers_have_is_not_sent_again(driver, vllm, backend, version, reused):
    vllm.backend, vllm.version = backend, version
    one, call = driver(), call_of()

    def named():
        one.begin("v2")
        one.update(call)
        listed = vllm.fake.calls[-1].body["update_info"]
        one.commit("v2")
        assert ("chunk_sizes" in listed) == (backend == "streamer" and bool(listed["names"]))
        return bool(listed["names"])

    assert [named(), named()] == [True, not reused]
    vllm.fail("/update_weights")
    with pytest.raises(ServerRefused):
        named()
    one.abandon()
    assert named(), "nobody knows what a failed call has left behind"
    one.join(JoinInfo({}, 1, 2, True, 64, 2))
    assert named(), "a join begins anew"
    call = call_of()
    assert named(), "another call"


def test_our_engine_is_told_the_chunks(driver, vllm):
    vllm.backend, vllm.device = "streamer", "cpu"
    one = driver()
    one.begin("v2")
    one.update(call_of())
    assert vllm.fake.calls[-1].body["update_info"]["chunk_sizes"] == [16]


def test_the_body_of_a_join(driver, vllm):
    one = driver()
    one.join(
        JoinInfo(
            rendezvous={"nccl_unique_id_b64": "abc="},
            rank_offset=3,
            world_size=7,
            packed=True,
            buffer_size=64,
            num_buffers=2,
        )
    )
    assert vllm.fake.calls[-1].body == {
        "init_info": {
            "nccl_unique_id_b64": "abc=",
            "rank_offset": 3,
            "world_size": 7,
            "packed": True,
            "packed_buffer_size_bytes": 64,
            "packed_num_buffers": 2,
        }
    }


@pytest.mark.parametrize(("version", "expected"), [("0.31.2", 0), ("0.32.0", 1), ("1.0", 1)])
def test_leaving_where_the_server_can(driver, vllm, version, expected):
    vllm.version = version
    driver().leave()
    assert len(vllm.fake.posts) == expected
