"""The way back from a failed sync, and from another trainer's."""

from __future__ import annotations

import pytest

from kit_checks import told
from kit_fake_vllm import MARK, PAUSE, RESET, call_of, steps, sync, update_fails
from streamer import IncompatibleServer, ServerError
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(60)


# Two trainers.


def test_a_server_that_another_trainer_has_taken_is_left_alone(driver, vllm):
    """Whoever wakes up late must not close, resume or unmark what is somebody else's by then."""
    late, other = driver(), driver()
    late.begin("v2")
    other.probe()
    other.begin("v3")
    vllm.fake.calls.clear()
    late.release()
    assert "another trainer" in told(late.abandon())
    late.leave()
    assert vllm.fake.posts == []
    assert vllm.serves == (f"{INCOMPLETE}v3", True, True)


def test_a_late_finish_does_not_commit_what_another_trainer_has_begun(driver, vllm):
    """A trainer that was suspended in mid-sync, and another that came meanwhile."""
    late, other = driver(), driver()
    late.begin("v2")
    late.update(call_of())
    other.probe()
    other.begin("v3")
    vllm.fake.calls.clear()
    with pytest.raises(ServerError, match=f"another trainer has pushed.*{INCOMPLETE}v3"):
        late.commit("v2")
    assert "another trainer" in told(late.abandon())
    assert steps(vllm) == [RESET], "which does no harm"
    assert vllm.serves == (f"{INCOMPLETE}v3", True, True)


# The way back.


def torn(driver, vllm, **options):
    """A driver whose last sync has failed."""
    one = driver(**options)
    update_fails(one, vllm)
    vllm.fake.calls.clear()
    return one


@pytest.mark.parametrize("whose", ["ours", "another trainer's"])
def test_a_torn_server_is_restored_before_the_next_update(driver, vllm, whose):
    """A plain start after a failed update fails: first a start and a finish with nothing."""
    one = torn(driver, vllm)
    if whose != "ours":
        one = driver()
    sync(one, "v3")
    assert steps(vllm) == [
        f"/update_weight_version {INCOMPLETE}v3",
        PAUSE,
        "/start_weight_update",
        "/finish_weight_update None",
        "/start_weight_update",
        "/update_weights",
        RESET,
        "/finish_weight_update None",
        "/update_weight_version v3",
        "/resume",
    ]
    assert vllm.serves == ("v3", False, False)


def test_our_engine_restores_itself(driver, vllm):
    vllm.backend = "streamer"
    one = torn(driver, vllm)
    one.begin("v3")
    assert steps(vllm) == [
        f"/update_weight_version {INCOMPLETE}v3",
        PAUSE,
        "/start_weight_update",
    ]


def test_an_update_that_a_dead_trainer_left_open_is_closed(driver, vllm):
    vllm.weight_version, vllm.paused, vllm.updating = MARK, True, True
    one = driver()
    sync(one, "v3")
    assert vllm.serves == ("v3", False, False)


def test_several_workers_that_do_not_recover_must_be_restarted(driver, vllm):
    vllm.world_size = 2
    one = torn(driver, vllm)
    vllm.fail("/start_weight_update", 500, "out of step")
    with pytest.raises(IncompatibleServer) as caught:
        one.begin("v3")
    assert "did not recover from its last failed update: restart it" in str(caught.value)
    assert "out of step" in str(caught.value)


@pytest.mark.parametrize("step", ["/pause", "/update_weight_version", "/start_weight_update",
                                  "/finish_weight_update"])  # fmt: skip
def test_release_of_a_torn_server_leaves_it_marked_and_paused(driver, vllm, step):
    """It holds a mixture: it must not serve."""
    one = torn(driver, vllm)
    vllm.fail(step, 500, "not now")
    with pytest.raises(ServerError) as caught:
        one.begin("v3")
    assert step in str(caught.value), "the first error is the one that tells"
    assert "not now" in str(caught.value)
    one.release()
    assert vllm.weight_version.startswith(INCOMPLETE)
    assert vllm.paused
    sync(one, "v4")
    assert vllm.serves == ("v4", False, False)


def test_a_server_that_its_user_had_paused_stays_paused_through_a_repair(driver, vllm):
    """The failed sync did not pause it; the one that repairs it must not resume it."""
    vllm.paused = True
    one = torn(driver, vllm)
    sync(one, "v3")
    assert vllm.serves == ("v3", True, False)


@pytest.mark.parametrize(
    ("workers", "closed"),
    [
        ([], False),
        ([{}], False),
        ([{"update_open": False}, {"update_open": False}], False),
        ([{"update_open": False}, {"update_open": True}], True),
    ],
)
def test_settling_goes_by_what_the_workers_said(driver, vllm, workers, closed):
    one = driver()
    vllm.updating = True
    one.settle(workers)
    assert vllm.updating is not closed
    assert steps(vllm) == (["/finish_weight_update None"] if closed else [])


def test_settling_may_be_refused(driver, vllm):
    driver().settle([{"update_open": True}])
    assert steps(vllm) == ["/finish_weight_update None"]


def test_is_ours_notices_another_server_or_trainer(driver, vllm):
    """Case 4."""
    one = driver()
    assert one.is_ours()
    sync(one, "v2")
    assert one.is_ours()
    vllm.weight_version = "default"
    assert not one.is_ours()
