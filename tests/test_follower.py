"""How ranks of a trainer find each other, on threads over one store."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore

from kit_sources import Shards
from streamer import RankError, TensorSpec, Timeouts
from streamer.exceptions import PushCancelled
from streamer.follower import follow
from streamer.plan import make_plan
from streamer.ranks import Leader, Ranks
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
