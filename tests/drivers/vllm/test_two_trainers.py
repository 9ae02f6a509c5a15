"""Two trainers at one server at the same time: it is never left paused without a mark."""

from __future__ import annotations

import contextlib

import pytest

from kit_checks import told
from kit_fake_vllm import MARK, PAUSE, RESET, SENT, call_of, commit_fails, steps, sync, update_fails
from streamer import ServerError, ServerRefused
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(60)
OTHERS = f"{INCOMPLETE}v3"


def test_a_push_that_began_since_we_joined_is_not_broken_into(driver, vllm):
    late, other = driver(), driver()
    other.begin("v3")
    vllm.fake.calls.clear()
    with pytest.raises(ServerError, match=f"another trainer has begun to push.*'{OTHERS}#"):
        late.begin("v2")
    late.release()
    assert vllm.fake.posts == []
    other.update(call_of())
    other.commit("v3")
    assert vllm.serves == ("v3", False, False)


def test_a_pause_is_not_taken_for_the_user_s_while_another_trainer_marks(driver, vllm):
    """Both are asked at once: the mark may come between the two answers."""
    late, other = driver(), driver()
    plain, stale = vllm.do_weight_info, ["default"]
    other.begin("v3")
    vllm.do_weight_info = lambda body: {"weight_version": stale.pop()} if stale else plain(body)
    with pytest.raises(ServerError, match="another trainer has begun to push"):
        late.begin("v2")
    late.release()
    assert vllm.serves == (OTHERS, True, True)


def test_what_another_trainer_has_pushed_meanwhile_is_what_a_release_gives_back(driver, vllm):
    late, other = driver(), driver()
    sync(other, "v3")
    vllm.fail("/start_weight_update", 500, "no")
    with pytest.raises(ServerRefused):
        late.begin("v2")
    late.release()
    assert vllm.serves == ("v3", False, False)


def begin_at_once(late, other, vllm):
    """``late`` looks, then ``other`` begins, then ``late`` goes on."""
    plain = vllm.do_update_weight_version

    def first_the_other(body):
        vllm.do_update_weight_version = plain
        other.begin("v3")
        return plain(body)

    vllm.do_update_weight_version = first_the_other
    with pytest.raises(ServerError, match="another trainer has begun to push at the same time"):
        late.begin("v2")


def test_two_that_begin_at_once_leave_a_mark_and_the_update_open(driver, vllm):
    late, other = driver(), driver()
    begin_at_once(late, other, vllm)
    assert told(late.release()) == (
        "is marked incomplete, and its open update is left to whoever has begun it: push again"
    )
    assert vllm.serves == (MARK, True, True), "what is open is the other's"
    other.update(call_of())
    with pytest.raises(ServerError, match="another trainer has pushed"):
        other.commit("v3")
    assert "another trainer" in told(other.abandon())
    third = driver()
    sync(third, "v4")
    assert vllm.serves == ("v4", False, False)


@pytest.mark.parametrize("backend", ["nccl", "streamer"])
def test_an_update_that_is_left_open_is_closed_by_whoever_finds_the_mark(driver, vllm, backend):
    vllm.backend = backend
    vllm.weight_version, vllm.paused, vllm.updating = OTHERS, True, True
    sync(driver(), "v4")
    assert vllm.serves == ("v4", False, False)


def test_a_mark_that_another_trainer_took_away_is_put_back(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.weight_version = "default"  # as one does that has begun at once, and is refused
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    assert told(one.abandon()) == (
        "may hold a mixture, had lost its mark, and is paused and marked incomplete: push again"
    )
    assert vllm.serves == (MARK, True, False)


def test_a_server_that_cannot_be_resumed_keeps_the_mark(driver, vllm):
    one = driver()
    vllm.fail("/start_weight_update", 500, "no")
    vllm.fail("/resume", 500, "no")
    with pytest.raises(ServerRefused):
        one.begin("v2")
    assert "/resume" in told(one.release())
    assert vllm.serves == (MARK, True, False)
    sync(driver(), "v3")
    assert vllm.serves == ("v3", False, False)


def test_the_mark_is_the_last_that_a_release_takes_away(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.fake.calls.clear()
    one.release()
    assert steps(vllm) == [
        "/finish_weight_update None",
        "/resume",
        "/update_weight_version default",
    ]


def test_where_the_caller_pauses_no_pause_is_claimed(driver, vllm):
    one = driver(pause="none")
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    assert told(one.abandon()).endswith("is marked incomplete: push again")
    assert vllm.serves == (MARK, False, False)


def test_where_the_caller_pauses_a_sync_that_failed_is_resumed_after(driver, vllm):
    """It was not the caller who had paused it."""
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with contextlib.suppress(ServerRefused):
        one.update(call_of())
    one.abandon()
    assert vllm.paused
    other = driver(pause="none")
    sync(other, "v3")
    assert PAUSE not in steps(vllm)
    assert vllm.serves == ("v3", False, False)


def test_where_the_caller_has_paused_it_stays_paused(driver, vllm):
    vllm.paused = True
    one = driver(pause="none")
    commit_fails(one, vllm, "/finish_weight_update")
    one.abandon()
    sync(driver(pause="none"), "v3")
    assert vllm.serves == ("v3", True, False)


def test_what_another_trainer_has_repaired_is_resumed_no_more(driver, vllm):
    """By then it may be the server's user who has paused it."""
    one, other = driver(), driver()
    update_fails(one, vllm)
    other.probe()
    sync(other, "v3")
    vllm.paused = True
    assert not one.is_ours()
    one.probe()
    sync(one, "v4")
    assert vllm.serves == ("v4", True, False)


def at(vllm, name, then):
    """Run ``then`` before the server answers the next call of ``name``."""
    plain = getattr(vllm, f"do_{name}")

    def first(body):
        setattr(vllm, f"do_{name}", plain)
        then()
        return plain(body)

    setattr(vllm, f"do_{name}", first)


def test_a_sync_that_is_about_to_resume_is_no_pause_of_the_user_s(driver, vllm):
    """One looks while the other is between its finish and its resume."""
    one = driver()
    one.begin("v2")
    one.update(call_of())
    late = driver()

    plain, resumed = late._claim._ask_both, []

    def asked_while_paused():
        answer = plain()
        if not resumed:
            assert answer == ("v2", True)
            resumed.append(vllm.do_resume({}))
        return answer

    late._claim._ask_both = asked_while_paused
    at(vllm, "resume", lambda: late.begin("v3"))
    one.commit("v2")
    late.update(call_of())
    late.commit("v3")
    assert resumed
    assert vllm.serves == ("v3", False, False)


def test_nothing_is_between_the_naming_and_the_resume(driver, vllm):
    """There a trainer that is killed leaves the server paused, and nobody sees why."""
    sync(driver(), "v2")
    calls = [call.path.partition("?")[0] for call in vllm.fake.calls]
    assert calls[-2:] == ["/update_weight_version", "/resume"]


@pytest.mark.parametrize("step", ["finish_weight_update", "resume"])
def test_a_release_stops_where_another_trainer_takes_over(driver, vllm, step):
    one = driver()
    one.begin("v2")
    at(vllm, step, lambda: setattr(vllm, "weight_version", OTHERS))
    vllm.fake.calls.clear()
    assert "was taken over by another trainer" in told(one.release())
    assert vllm.fake.posts[-1] == f"/{step}"
    assert vllm.weight_version == OTHERS


def test_a_user_s_pause_is_not_undone_after_another_trainer_s_repair(driver, vllm):
    """The repair comes when one has been asked already what it is, and before it begins."""
    vllm.backend = "streamer"
    one, other = driver(), driver()
    update_fails(one, vllm)
    one.probe()
    other.probe()
    sync(other, "v3")
    vllm.paused = True
    sync(one, "v4")
    assert vllm.serves == ("v4", True, False)


def test_what_another_trainer_begins_while_arrival_is_proven_is_not_named(driver, vllm):
    one = driver(verify=True)
    one.begin("v2")
    one.update(call_of())
    other = driver()
    at(vllm, "weight_checker", lambda: (other.probe(), other.begin("v3")))
    with pytest.raises(ServerError, match="another trainer has pushed"):
        one.commit("v2", SENT)
    assert "another trainer" in told(one.abandon())
    assert vllm.serves == (OTHERS, True, True)


@pytest.mark.parametrize("how", ["commit", "release", "abandon"])
def test_two_that_push_the_same_version_are_told_apart(driver, vllm, how):
    """One is suspended in mid-sync, and another one takes over."""
    late, other = driver(), driver()
    late.begin("v2")
    late.update(call_of())
    other.probe()
    other.begin("v2")
    vllm.fake.calls.clear()
    if how == "commit":
        with pytest.raises(ServerError, match="another trainer has pushed"):
            late.commit("v2")
    elif how == "release":
        late.release()
    else:
        assert "another trainer" in told(late.abandon())
    late.leave()
    assert [post for post in steps(vllm) if post != RESET] == []
    other.update(call_of())
    other.commit("v2")
    assert vllm.serves == ("v2", False, False)
