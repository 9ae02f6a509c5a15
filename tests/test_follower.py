"""How ranks of a trainer find each other, on threads over one store."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from kit_sources import Shards
from streamer import DeadlineExceeded, RankError, TensorSpec, Timeouts, WeightSource
from streamer.exceptions import PushCancelled
from streamer.follower import follow
from streamer.plan import make_plan
from streamer.ranks import Leader, Ranks, newest_lead
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
            leader.begin(make_plan(SPECS))

    with pytest.raises(DeadlineExceeded, match=r"^the push took longer than its limit of 0\.2 s$"):
        follow(ranks[1], short, lambda: None) if rank == 1 else lead()


def test_a_rank_that_gives_up_once_rank_0_has_read_that_it_is_well_makes_that_chunk(ranks):
    """Rank 0 is about to write that all go on: it would wait in the collective for ever."""
    zero, one = ranks
    deciding = threading.Event()
    write = zero.ranks.write

    def decide(key, message):
        if "go" in message and message["step"] == 2:
            deciding.set()
            while "failed" not in zero.ranks.read("rank1"):
                time.sleep(0.001)
        write(key, message)

    zero.ranks.write = decide
    thread, failures = beside(lead, zero)
    with pytest.raises(PushCancelled):
        follow(one, clock(), lambda: deciding.is_set() and cancelled())
    thread.join(5)
    assert "rank 1 failed: PushCancelled" in str(failures)
    assert one.passes == 1


class Collective(WeightSource):
    """Eight tensors, each of which takes all ranks at once."""

    def __init__(self, ranks, barrier):
        self.ranks = ranks
        self._barrier = barrier
        self._steps = iter(())

    def specs(self):
        return [TensorSpec(f"t{index}", torch.float32, (2,)) for index in range(8)]

    def __iter__(self):
        self._made = 0
        self._steps = self._produce()
        return self._steps

    def _produce(self):
        for spec in self.specs():
            self._barrier.wait(10)
            self._made += 1
            yield spec.name, torch.zeros(2)

    def catch_up(self, stop):
        while self._made < (8 if stop is None else stop):
            next(self._steps)


@pytest.mark.parametrize("seed", range(8))
def test_whoever_gives_up_whenever_no_rank_is_left_in_a_collective(seed):
    """Rank 0 may have read that the one that gives up is well, and be in the next collective."""
    chance = random.Random(seed)
    store, barrier = HashStore(), threading.Barrier(3)
    ranks = [Collective(Ranks(store, rank, 3), barrier) for rank in range(3)]
    ended = [[], [], []]

    def giving_up(after):
        until = time.monotonic() + after

        def check():
            if time.monotonic() > until:
                cancelled()

        return check

    def push(rank, after):
        source, check = ranks[rank], giving_up(after)
        if rank > 0:
            return follow(source, clock(), check)
        with Leader(source, clock()) as leader:
            plan = make_plan(source.specs(), buffer_size=16)
            leader.begin(plan)
            payloads = leader.within(iter(source))
            for chunk in plan.chunks:
                check()
                leader.check()
                for _ in chunk.specs:
                    next(payloads)
            next(payloads, None)
            leader.finish(REPORT)
        return REPORT

    def run(rank, patience):
        for after in patience:
            try:
                ended[rank].append(push(rank, after))
            except (RankError, PushCancelled) as error:
                ended[rank].append(error)
            except BaseException as error:
                ended[rank].append(error)
                raise

    # In each push one of them gives up, within the time that a push takes; in the last one none.
    patience = [[5.0] * 9 for _ in ranks]
    for number in range(8):
        patience[chance.randrange(3)][number] = chance.uniform(0, 0.02)
    threads = [beside(run, rank, patience[rank]) for rank in range(3)]
    for thread, failures in threads:
        thread.join(30)
        assert not thread.is_alive()
        assert not failures
    assert not barrier.broken
    for outcomes in zip(*ended, strict=True):
        assert len({isinstance(outcome, Report) for outcome in outcomes}) == 1
    assert [outcomes[-1] for outcomes in ended] == [REPORT] * 3
