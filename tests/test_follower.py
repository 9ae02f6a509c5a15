"""How ranks of a trainer find each other, on threads over one store."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from kit_sources import Shards
from streamer import DeadlineExceeded, RankError, TensorSpec, Timeouts
from streamer.exceptions import PushCancelled
from streamer.follower import follow
from streamer.leader import Leader
from streamer.plan import make_plan
from streamer.ranks import Ranks, newest_lead
from streamer.report import Report, Seconds
from streamer.timeouts import Clock

SPECS = [TensorSpec("a", torch.float32, (2,))]
REPORT = Report(1, 8, 1, Seconds(0, 0, 0, 0, 0), "v", ())


def clock():
    clock = Clock(Timeouts(5, 5))
    clock.start()
    return clock


def lead(source):
    with Leader(source, clock()) as leader:
        plan = make_plan(SPECS)
        leader.meet()
        leader.begin(plan)
        leader.check()
        for _ in leader.within(iter([torch.zeros(2), None])):
            pass
        leader.finish(REPORT)


def beside(step, *arguments):
    failures = []

    def run():
        try:
            step(*arguments)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def cancelled():
    raise PushCancelled("the push was cancelled")


@pytest.fixture
def ranks():
    store = HashStore()
    return Shards(Ranks(store, 0, 2)), Shards(Ranks(store, 1, 2))


def test_both_ranks_come(ranks):
    zero, one = ranks
    for push in range(1, 4):
        thread, failures = beside(lead, zero)
        assert follow(one, clock(), lambda: None) == REPORT
        thread.join(5)
        assert not failures
        assert one.passes == push


def test_a_rank_that_gives_up_before_rank_0_has_begun(ranks):
    """Its next push is not taken for the one that it has given up."""
    zero, one = ranks
    with pytest.raises(PushCancelled):
        follow(one, clock(), cancelled)
    thread, failures = beside(follow, one, clock(), lambda: None)
    with pytest.raises(RankError, match="rank 1 failed: PushCancelled"):
        lead(zero)
    assert thread.is_alive()
    assert one.passes == 0
    lead(zero)
    thread.join(5)
    assert not failures
    assert one.passes == 1


def test_a_rank_that_gives_up_as_rank_0_begins_is_in_that_push(ranks):
    zero, one = ranks
    begun = []

    def give_up_once_it_has_begun():
        begun.append(beside(lead, zero))
        while not newest_lead(one.ranks):
            time.sleep(0.001)
        cancelled()

    with pytest.raises(PushCancelled):
        follow(one, clock(), give_up_once_it_has_begun)
    [(thread, failures)] = begun
    thread.join(5)
    assert "rank 1 failed: PushCancelled" in str(failures)


def test_a_rank_that_has_waited_in_vain_comes_again(ranks):
    zero, one = ranks
    short = Clock(Timeouts(0.1, 5))
    short.start()
    with pytest.raises(RankError, match="rank 0 did not come"):
        follow(one, short, lambda: None)
    thread, failures = beside(follow, one, clock(), lambda: None)
    lead(zero)
    thread.join(5)
    assert not failures


@pytest.mark.parametrize("rank", [0, 1])
def test_a_push_without_time_to_wait_for_the_other_rank_says_so(ranks, rank):
    """It did not wait for as long as it may for any rank to come."""
    short = Clock(Timeouts(5, 5, total=0.2))
    short.start()

    def lead():
        with Leader(ranks[0], short) as leader:
            leader.meet()

    with pytest.raises(DeadlineExceeded, match=r"^the push took longer than its limit of 0\.2 s$"):
        follow(ranks[1], short, lambda: None) if rank == 1 else lead()
