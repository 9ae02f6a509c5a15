"""A sync that fails, before and after bytes were sent."""

from __future__ import annotations

import re
import time

import pytest

from kit_checks import told
from kit_fake_vllm import MARK, SENT, call_of, commit_fails, sync
from streamer import DeadlineExceeded, Held, Remedy, ServerError, ServerRefused, Timeouts
from streamer.drivers import recovery
from streamer.drivers.mark import INCOMPLETE

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
        said = told(one.release())
        assert re.search("old.* is marked .*its pause may still be.*push again", said)
        assert vllm.serves == (MARK, False, False), "who knows that it will not be paused yet?"
    else:
        assert told(one.release()) == ""
        eventually(lambda: vllm.serves == ("default", False, False))
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


@pytest.mark.parametrize(
    ("path", "left", "says"),
    [
        ("/update_weight_version", ("default", False, False), "may yet be marked incomplete"),
        ("/pause", (MARK, False, False), "its pause may still"),
        ("/start_weight_update", (MARK, True, False), "its start may still"),
    ],
)
@pytest.mark.parametrize("how", ["never", 502, 503, 504, 408, 499, 524, "html"])
def test_what_may_still_be_carried_out_keeps_the_mark(driver, vllm, path, left, says, how):
    """Nor is a server resumed whose update may be opened yet: a completion would end vLLM."""
    one = driver(Timeouts(5, 0.3))
    if how == "never":
        vllm.delay(path, 1, first=True)
    else:
        vllm.fail(path, 200 if how == "html" else how, "<html>please wait")
    with pytest.raises((DeadlineExceeded, ServerError), match=path):
        one.begin("v2")
    assert says in told(one.release())
    assert vllm.serves == left


@pytest.mark.parametrize("how", ["refused", "late"])
@pytest.mark.parametrize(
    ("path", "left", "paused"),
    [
        ("/finish_weight_update", (MARK, True, True), " and left paused"),
        ("/resume", (MARK, True, False), " and left paused"),
        ("/update_weight_version", (MARK, False, False), ""),
    ],
)
def test_the_first_step_of_a_release_that_fails_is_the_last(
    driver, vllm, monkeypatch, path, left, paused, how
):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.3)
    one = driver()
    one.begin("v2")
    vllm.fake.calls.clear()
    if how == "late":
        vllm.delay(path, 1, first=True)
    else:
        vllm.fail(path, 500, "a CUDA error")
    said = told(one.release())
    why = rf"(\(POST .*{path}: .*\))"
    if how == "late":
        what = rf"does not answer {why}, and may be marked incomplete{paused}"
    else:
        what = rf"holds the old weights, but is marked incomplete{paused} {why}"
    assert re.search(f"{what}: push again", said)
    assert vllm.fake.posts[-1] == path
    assert vllm.serves == left
    time.sleep(1.2 if how == "late" else 0)
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_takes_no_mark_is_left_as_it_was(driver, vllm, status):
    one = driver()
    vllm.fail("/update_weight_version", status, "no", times=9)
    with pytest.raises(ServerError, match="/update_weight_version"):
        one.begin("v2")
    vllm.fake.calls.clear()
    assert told(one.release()) == ""
    assert vllm.fake.posts == []


def test_a_server_without_the_routes_of_an_update_is_resumed(driver, vllm):
    """A finish that is not found says as well that nothing is open."""
    one = driver()
    for path in ("/start_weight_update", "/finish_weight_update"):
        vllm.fail(path, 404, "no", times=9)
    with pytest.raises(ServerError, match="has no /start_weight_update"):
        one.begin("v2")
    assert told(one.release()) == ""
    assert vllm.serves == ("default", False, False)


def test_a_mixture_is_told_of_also_where_no_byte_was_sent(driver, vllm):
    vllm.weight_version, vllm.paused = MARK, True
    one = driver()
    vllm.fail("/start_weight_update", 500, "not now")
    with pytest.raises(ServerRefused):
        one.begin("v3")
    assert told(one.release()) == (
        "still holds a mixture of weights and is marked incomplete and left paused: push again"
    )
    assert vllm.serves == (MARK, True, False)


@pytest.mark.parametrize("end", ["release", "abandon", "leave"])
def test_a_question_that_a_gateway_refuses_is_asked_again(driver, vllm, end):
    one = driver()
    one.begin("v2")
    vllm.fail("/weight_info", 502, "gave up")
    getattr(one, end)()
    assert vllm.updating is (end == "leave")


def test_each_call_has_what_is_left_of_the_whole_time(driver, vllm):
    one = driver(Timeouts(5, 5, total=1.5))
    one._clock.start()
    vllm.delay("/update_weight_version", 1.2)
    started = time.monotonic()
    plain = vllm.do_pause
    vllm.do_pause = lambda body: (time.sleep(2), plain(body))[1]
    with pytest.raises(DeadlineExceeded, match="/pause"):
        one.begin("v2")
    assert time.monotonic() - started < 2


def test_a_server_that_hangs_is_asked_once(driver, vllm, monkeypatch):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.3)
    one = driver()
    one.begin("v2")
    vllm.delay("/", 2)
    vllm.fake.calls.clear()
    assert re.search(r"does not answer \(.*\), and may be marked incomplete", told(one.release()))
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
    said = told(one.abandon())
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
    held = one.abandon()
    assert told(held).endswith(f": {remedy}")
    assert held.remedy is (Remedy.RESTART if "restart" in remedy else Remedy.PUSH)


def test_advice_is_given_once(driver, vllm, monkeypatch):
    """What broke off asks whether the server is up, to which the end of the line is the answer."""
    one = driver()
    one.begin("v2")
    vllm.fake.routes["GET /weight_info"] = lambda handler: handler.connection.close()
    held = told(one.abandon())
    assert held.startswith(f"holds a mixture of weights and does not answer (GET {vllm.fake.url}/")
    assert held.endswith("): restart it")
    assert "is the server up?" not in held


def test_abandon_where_the_server_has_closed_the_update_itself(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.updating = False
    assert "push again" in told(one.abandon())


def test_abandon_a_server_of_several_workers_with_vllm_s_engine(driver, vllm):
    """Its executor is out of step: only a restart helps."""
    vllm.world_size = 2
    one = driver()
    one.begin("v2")
    assert told(one.abandon()) == (
        "holds a mixture of old and new weights, and its workers may be out of step: restart it "
        "(the streamer backend survives this)"
    )
    vllm.backend = "streamer"
    other = driver()
    other.begin("v3")
    assert "push again" in told(other.abandon())


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
    said = told(one.abandon())
    assert said.startswith("holds a mixture of weights and does not answer (POST ")
    assert said.endswith("): restart it")


LEFT = "holds the new weights, but is marked incomplete and left paused: push again"


def test_abandon_resumes_where_all_has_arrived(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/resume")
    assert told(one.abandon()) == "holds the new weights, and answers with them"
    assert vllm.serves == ("v2", False, False)
    assert one.is_ours()


def test_abandon_marks_what_cannot_be_resumed(driver, vllm):
    """The mark tells the next trainer that it was a sync, and not the user, that has paused it."""
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.fail("/resume", 500, "no")
    assert told(one.abandon()) == LEFT
    assert vllm.serves == (MARK, True, False)
    assert one.is_ours()
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", False, False)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("how", ["refused", "done", "late"])
@pytest.mark.parametrize("held", [False, True], ids=["ours", "its user's"])
def test_a_naming_without_an_answer_leaves_no_pause_of_ours(driver, vllm, verify, how, held):
    """It may be carried out yet, and takes the mark away then."""
    vllm.paused = held
    one = driver(Timeouts(5, 0.4), verify=verify)
    one.begin("v2")
    one.update(call_of())
    if how == "refused":
        vllm.fail("/update_weight_version", 500, "no")
    else:
        vllm.delay("/update_weight_version", 1, first=how == "late")
    with pytest.raises((DeadlineExceeded, ServerRefused), match="/update_weight_version"):
        one.commit("v2", SENT)
    if how == "done":
        assert one.abandon() == Held("holds the new weights, and answers with them", Remedy.NONE)
        assert vllm.serves == ("v2", held, False)
    else:
        assert told(one.abandon()) == "holds the new weights, but is marked incomplete: push again"
        assert vllm.weight_version.startswith(INCOMPLETE)
        assert vllm.serves[1:] == (held, False)
    if how == "late":
        time.sleep(1.2)
        assert vllm.serves == ("v2", held, False)
    sync(driver(), "v3")
    assert vllm.serves == ("v3", held, False)


def test_a_push_that_does_not_begin_undoes_nothing_of_the_last(driver, vllm):
    one = driver()
    sync(one, "v2")
    vllm.fake.calls.clear()
    assert told(one.release()) == ""
    assert vllm.fake.calls == []


@pytest.mark.parametrize("done", [False, True])
def test_a_finish_that_comes_late_leaves_the_mark(driver, vllm, done):
    """Its trainer has given up, or is dead: nobody but the mark tells why it is paused."""
    one = driver(Timeouts(5, 0.4))
    one.begin("v2")
    one.update(call_of())
    vllm.delay("/finish_weight_update", 1, first=not done)
    with pytest.raises(DeadlineExceeded, match="/finish_weight_update"):
        one.commit("v2")
    how = "the new weights, or a mixture of old and new ones," if done else "the new weights, but"
    left = f"holds {how} is marked incomplete and left paused: push again"
    assert told(one.abandon()) == left
    time.sleep(1.2)
    assert vllm.serves == (MARK, True, False)
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


def test_abandon_after_the_finish_where_it_cannot_be_marked(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.fail("/resume", 500, "no")
    vllm.fail("/update_weight_version", 500, "no")
    held = one.abandon()
    assert told(held) == "holds the new weights, but may still be paused: POST /resume to it"
    assert held.remedy is Remedy.RESUME
    assert vllm.serves == ("v2", True, False)


@pytest.mark.parametrize("held", [False, True], ids=["ours", "its user's"])
def test_a_failed_reset_does_not_resume_what_its_user_had_paused(driver, vllm, held):
    vllm.paused = held
    one = driver()
    commit_fails(one, vllm, "/reset_prefix_cache")
    paused = "" if held else " and left paused"
    assert (
        told(one.abandon())
        == f"holds the new weights, but is marked incomplete{paused}: push again"
    )
    assert vllm.serves[1:] == (True, False)
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", held, False)


def test_what_another_trainer_has_taken_after_the_finish_is_not_marked(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.weight_version = "v3"
    assert "another trainer" in told(one.abandon())
    assert vllm.weight_version == "v3"


def test_abandon_after_a_finish_that_failed(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/finish_weight_update", "missing parameters: lm_head")
    assert "holds a mixture" in told(one.abandon())
    assert vllm.serves == (MARK, True, False)
