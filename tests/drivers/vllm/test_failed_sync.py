"""A sync that fails, before and after bytes were sent."""

from __future__ import annotations

import re
import time

import pytest

from kit_fake_vllm import MARK, call_of, commit_fails, sync
from streamer import DeadlineExceeded, ServerError, ServerRefused, Timeouts
from streamer.drivers import recovery

pytestmark = pytest.mark.timeout(60)


# A sync that fails before a byte was sent: the server goes on with its old weights.

BEGIN = ["/is_paused", "/pause", "/update_weight_version", "/start_weight_update"]


@pytest.mark.parametrize("paused", [False, True], ids=["serving", "paused"])
@pytest.mark.parametrize("path", [*BEGIN, None])
@pytest.mark.parametrize("status", [500, 404])
def test_release_undoes_a_begin_that_failed(driver, vllm, path, status, paused):
    vllm.paused = paused
    one = driver()
    if path is None:
        one.begin("v2")
    else:
        vllm.fail(path, status, "no")
        with pytest.raises(ServerError):
            one.begin("v2")
    one.release()
    assert vllm.serves == ("default", paused, False)
    sync(one, "v3")
    assert vllm.serves == ("v3", paused, False)


@pytest.mark.parametrize("path", BEGIN)
def test_release_undoes_what_took_effect_without_an_answer(driver, vllm, path, eventually):
    """The call was carried out, its answer came too late."""
    one = driver(Timeouts(5, 0.3))
    vllm.delay(path, 1)
    with pytest.raises(DeadlineExceeded, match=path):
        one.begin("v2")
    if path == "/pause":
        said = one.release()
        assert re.search("old.* is marked .*its pause was not answered.*push again", said)
        assert vllm.serves == (MARK, False, False), "who knows that it will not be paused yet?"
    else:
        assert one.release() == ""
        eventually(lambda: vllm.serves == ("default", False, False))
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


@pytest.mark.parametrize(
    ("path", "left", "says"),
    [
        ("/update_weight_version", ("default", False, False), "may be marked incomplete yet"),
        ("/pause", (MARK, False, False), "its pause was not answered, and may still"),
        ("/start_weight_update", (MARK, True, False), "its start was not answered, and may still"),
    ],
)
@pytest.mark.parametrize("how", ["never", 502, 504])
def test_what_may_still_be_carried_out_keeps_the_mark(driver, vllm, path, left, says, how):
    """Nor is a server resumed whose update may be opened yet: a completion would end vLLM."""
    one = driver(Timeouts(5, 0.3))
    if how == "never":
        vllm.delay(path, 1, first=True)
    else:
        vllm.fail(path, how, "gave up")
    with pytest.raises((DeadlineExceeded, ServerRefused), match=path):
        one.begin("v2")
    assert says in one.release()
    assert vllm.serves == left


@pytest.mark.parametrize("how", ["refused", "late"])
@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("/finish_weight_update", (MARK, True, True)),
        ("/resume", (MARK, True, False)),
        ("/update_weight_version", (MARK, False, False)),
    ],
)
def test_the_first_step_of_a_release_that_fails_is_the_last(
    driver, vllm, monkeypatch, path, left, how
):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.3)
    one = driver()
    one.begin("v2")
    vllm.fake.calls.clear()
    if how == "late":
        vllm.delay(path, 1, first=True)
    else:
        vllm.fail(path, 500, "a CUDA error")
    said = one.release()
    assert re.search(f"holds the old weights.*{path}.*push again", said)
    assert "marked incomplete and left paused" in said
    assert vllm.fake.posts[-1] == path
    assert vllm.serves == left
    time.sleep(1.2 if how == "late" else 0)
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


def test_a_server_that_hangs_is_asked_once(driver, vllm, monkeypatch):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.3)
    one = driver()
    one.begin("v2")
    vllm.delay("/", 2)
    vllm.fake.calls.clear()
    assert re.search(r"does not answer \(.*\), and may be marked incomplete", one.release())
    one.leave()
    assert [call.path for call in vllm.fake.calls] == ["/weight_info"]


def test_a_server_that_tells_no_version_is_not_left_marked(driver, vllm):
    vllm.weight_version = None
    one = driver()
    one.begin("v2")
    one.release()
    assert vllm.serves == ("default", False, False)


def test_release_of_what_did_not_begin_does_nothing(driver, vllm):
    one = driver()
    one.release()
    assert vllm.fake.posts == []
    sync(one, "v2")
    one.release()
    assert vllm.serves == ("v2", False, False)


# A sync that fails after bytes were sent.


def test_abandon_closes_the_update_and_leaves_the_server_paused_and_marked(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weights", 500, {"error": {"message": "shape mismatch"}})
    with pytest.raises(ServerRefused, match="/update_weights: 500 shape mismatch"):
        one.update(call_of())
    said = one.abandon()
    assert said == (
        "holds a mixture of old and new weights, is marked incomplete and left paused: push again"
    )
    assert vllm.serves == (MARK, True, False)
    assert one.is_ours()


@pytest.mark.parametrize(("status", "remedy"), [(503, "restart it"), (404, "push again")])
def test_abandon_a_server_that_has_lost_a_worker(driver, vllm, status, remedy):
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    vllm.fake.routes["GET /health"] = vllm.reply("", status)
    assert one.abandon().endswith(f": {remedy}")


def test_abandon_where_the_server_has_closed_the_update_itself(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.updating = False
    assert "push again" in one.abandon()


def test_abandon_a_server_of_several_workers_with_vllm_s_engine(driver, vllm):
    """Its executor is out of step: only a restart helps."""
    vllm.world_size = 2
    one = driver()
    one.begin("v2")
    assert one.abandon() == (
        "holds a mixture of old and new weights, and its workers may be out of step: restart it "
        "(the streamer backend survives this)"
    )
    vllm.backend = "streamer"
    other = driver()
    other.begin("v3")
    assert "push again" in other.abandon()


@pytest.mark.parametrize("how", ["gone", "html"])
def test_abandon_a_server_that_does_not_answer(driver, vllm, how):
    one = driver()
    one.begin("v2")
    if how == "gone":
        vllm.fake.routes["POST /finish_weight_update"] = lambda handler: (
            setattr(handler, "close_connection", True),
            handler.connection.close(),
        )
    else:
        vllm.fail("/finish_weight_update", 200, "<html>")
    said = one.abandon()
    assert said.startswith("holds a mixture of weights and does not answer (POST ")
    assert said.endswith("): restart it")


LEFT = "holds the new weights, but is marked incomplete and left paused: push again"


def test_abandon_after_the_finish(driver, vllm):
    """The mark tells the next trainer that it was a sync, and not the user, that has paused it."""
    one = driver()
    commit_fails(one, vllm, "/resume")
    assert one.abandon() == LEFT
    assert vllm.serves == (MARK, True, False)
    assert one.is_ours()
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", False, False)


def test_abandon_after_a_resume_that_was_done(driver, vllm):
    """Only its answer was lost."""
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.paused = False
    assert one.abandon() == "holds the new weights, and answers with them"
    assert vllm.serves == ("v2", False, False)


@pytest.mark.parametrize("path", ["/is_paused", "/update_weight_version"])
def test_abandon_after_the_finish_where_it_cannot_be_marked(driver, vllm, path):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.fail(path, 500, "no")
    assert one.abandon() == "holds the new weights, but may still be paused: POST /resume to it"
    assert vllm.serves == ("v2", True, False)


@pytest.mark.parametrize("held", [False, True], ids=["ours", "its user's"])
def test_a_failed_reset_does_not_resume_what_its_user_had_paused(driver, vllm, held):
    vllm.paused = held
    one = driver()
    commit_fails(one, vllm, "/reset_prefix_cache")
    assert "holds a mixture" in one.abandon()
    assert vllm.serves[1:] == (True, False)
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", held, False)


def test_what_another_trainer_has_taken_after_the_finish_is_not_marked(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.weight_version = "v3"
    assert "another trainer" in one.abandon()
    assert vllm.weight_version == "v3"


def test_abandon_after_a_finish_that_failed(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/finish_weight_update", "missing parameters: lm_head")
    assert "holds a mixture" in one.abandon()
    assert vllm.serves == (MARK, True, False)
