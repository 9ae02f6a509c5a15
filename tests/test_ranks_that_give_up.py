"""Ranks that are cancelled, fail or run out of time at any moment: none is left in a collective.

On threads over one store, with a barrier in place of the collective: it breaks where a rank comes
to it alone.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from streamer import DeadlineExceeded, RankError, StreamerError, TensorSpec, Timeouts, WeightSource
from streamer.exceptions import PushCancelled
from streamer.follower import follow
from streamer.integrations.lockstep import Lockstep
from streamer.leader import Leader
from streamer.plan import make_plan
from streamer.ranks import Ranks
from streamer.report import Report, Seconds
from streamer.session import Session
from streamer.timeouts import Clock

REPORT = Report(1, 8, 1, Seconds(0, 0, 0, 0, 0), "v", ())


class Collective(WeightSource):
    """Eight tensors, each of which takes all ranks at once."""

    def __init__(self, ranks, barrier):
        self.ranks = ranks
        self.fails = False
        self._barrier = barrier
        self._steps = iter(())

    def specs(self):
        if self.fails:
            raise RuntimeError("made to fail")
        return [TensorSpec(f"t{index}", torch.float32, (2,)) for index in range(8)]

    def __iter__(self):
        self._made = 0
        self._steps = self._produce()
        return self._steps

    def _produce(self):
        for index in range(8):
            self._barrier.wait(10)
            self._made += 1
            yield f"t{index}", torch.zeros(2)

    def catch_up(self, stop):
        while self._made < (8 if stop is None else stop):
            next(self._steps)


def clock(connect=10.0, progress=10.0, total=None):
    clock = Clock(Timeouts(connect, progress, total))
    clock.start()
    return clock


def cancelled():
    raise PushCancelled("the push was cancelled")


def lead(source, clock, check=lambda: None, version=None):
    with Leader(source, clock, check) as leader:
        leader.meet()
        plan = make_plan(source.specs(), buffer_size=16)
        leader.begin(plan, version)
        payloads = leader.within(iter(source))
        for chunk in plan.chunks:
            check()
            leader.check()
            for _ in chunk.specs:
                next(payloads)
        next(payloads, None)
        leader.finish(REPORT)
    return REPORT


class Beside:
    """A step on a thread of its own: what it has come to, and in how many seconds."""

    def __init__(self, step, *arguments):
        self._outcome = []
        self._started = time.monotonic()
        self.thread = threading.Thread(target=self._run, args=(step, arguments), daemon=True)
        self.thread.start()

    def _run(self, step, arguments):
        try:
            self._outcome.append(step(*arguments))
        except BaseException as error:
            self._outcome.append(error)
        self.seconds = time.monotonic() - self._started

    def outcome(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        [outcome] = self._outcome
        return outcome


@pytest.fixture
def barrier():
    barrier = threading.Barrier(2)
    yield barrier
    assert not barrier.broken


@pytest.fixture
def two(barrier):
    store = HashStore()
    return [Collective(Ranks(store, rank, 2), barrier) for rank in range(2)]


def check_the_next_push_works(two):
    zero = Beside(lead, two[0], clock())
    assert follow(two[1], clock(), lambda: None) == REPORT
    assert zero.outcome() == REPORT


def test_one_that_rank_0_has_read_is_well_makes_that_chunk(two):
    """Rank 0 is about to write that all go on: it would wait in the collective for ever."""
    deciding = threading.Event()
    write = two[0].ranks.write

    def decide(key, message):
        if "go" in message and message["step"] == 3:
            deciding.set()
            while "failed" not in two[0].ranks.read("rank1"):
                time.sleep(0.001)
        write(key, message)

    two[0].ranks.write = decide
    zero = Beside(lead, two[0], clock())
    with pytest.raises(PushCancelled):
        follow(two[1], clock(), lambda: deciding.is_set() and cancelled())
    assert "rank 1 failed: PushCancelled" in str(zero.outcome())
    two[0].ranks.write = write
    check_the_next_push_works(two)


def test_one_without_time_left_as_it_comes_to_a_step(two):
    """It has written that it is well by then."""
    write = two[1].ranks.write

    def write_late(key, message):
        write(key, message)
        if message["step"] == 3 and "failed" not in message:
            time.sleep(0.5)

    two[1].ranks.write = write_late
    zero = Beside(lead, two[0], clock())
    with pytest.raises(DeadlineExceeded, match="took longer than its limit"):
        follow(two[1], clock(total=0.4), lambda: None)
    assert "rank 1 failed: DeadlineExceeded" in str(zero.outcome())
    two[1].ranks.write = write
    check_the_next_push_works(two)


def test_the_limit_of_a_rank_is_its_own(two):
    """While rank 0 is busy with servers; and rank 0 is not the one to blame."""
    busy = iter([0.0, 2.0])
    zero = Beside(lead, two[0], clock(), lambda: time.sleep(next(busy, 0.0)))
    one = Beside(follow, two[1], clock(total=0.3), lambda: None)
    assert str(one.outcome()) == "the push took longer than its limit of 0.3 s"
    assert "rank 1 failed: DeadlineExceeded" in str(zero.outcome())


def test_one_that_gives_up_twice_before_rank_0_comes_fails_two_pushes(two):
    for _ in range(2):
        with pytest.raises(PushCancelled):
            follow(two[1], clock(), cancelled)
    for _ in range(2):
        zero = Beside(lead, two[0], clock())
        assert "rank 1" in str(zero.outcome())
        assert zero.seconds < 5
    check_the_next_push_works(two)


def test_one_that_gives_up_and_has_given_the_next_push_up_as_well(two):
    """Rank 0, which was busy, finds the second of the two only."""
    busy = threading.Event()
    zero = Beside(lead, two[0], clock(), lambda: busy.wait(10))
    step = iter(range(9))
    for give_up in (lambda: next(step) > 2 and cancelled(), cancelled):
        with pytest.raises(PushCancelled):
            follow(two[1], clock(), give_up)
    busy.set()
    assert "rank 1" in str(zero.outcome())
    assert zero.seconds < 9
    assert "rank 1" in str(Beside(lead, two[0], clock()).outcome())
    check_the_next_push_works(two)


def test_one_that_comes_to_what_rank_0_has_given_up_is_told(two):
    """It does not wait for the next push of rank 0, whose weights are later ones."""
    with pytest.raises(RankError, match="rank 1 did not come"):
        lead(two[0], clock(connect=0.1))
    with pytest.raises(RankError, match="rank 1 did not come"):
        follow(two[1], clock(), lambda: None)
    check_the_next_push_works(two)


def test_ranks_at_different_steps_are_found_out(two):
    """Rank 1 comes to what rank 0 has failed twice, and is one step behind from then on."""
    for _ in range(2):
        with pytest.raises(RankError, match="rank 1 did not come"):
            lead(two[0], clock(connect=0.1), version="step-1")
    with pytest.raises(RankError, match="rank 1 did not come"):
        follow(two[1], clock(), lambda: None, "step-1")
    zero = Beside(lead, two[0], clock(), lambda: None, "step-3")
    with pytest.raises(RankError) as caught:
        follow(two[1], clock(), lambda: None, "step-2")
    message = "rank 1 pushes weight version 'step-2', and rank 0 'step-3': every rank must push "
    assert str(caught.value) == f"{message}the same step at the same time"
    outcome = zero.outcome()
    assert (type(outcome), str(outcome), outcome.rank) == (RankError, str(caught.value), 1)
    check_the_next_push_works(two)


@pytest.mark.parametrize("versions", [("v", "v"), ("v", None), (None, "v")])
def test_one_version_of_one_push_is_no_difference(two, versions):
    zero = Beside(lead, two[0], clock(), lambda: None, versions[0])
    assert follow(two[1], clock(), lambda: None, versions[1]) == REPORT
    assert zero.outcome() == REPORT


def test_one_that_is_cancelled_as_its_source_is_opened_is_in_that_push(two, barrier):
    """Its next push, with later weights, is not taken for it."""
    session = Session(None)

    class Opened(Collective):
        opened = 0

        @property
        def ranks(self):
            self.opened += 1
            if self.opened == 1:
                session.cancel()
            return two[1].ranks

        @ranks.setter
        def ranks(self, ranks):
            pass

    one = Opened(None, barrier)
    zero = Beside(lead, two[0], clock())
    with pytest.raises(PushCancelled):
        session.push(one)
    assert "rank 1 failed: PushCancelled" in str(zero.outcome())
    check_the_next_push_works([two[0], one])


@pytest.mark.parametrize("insist", [False, True])
def test_rank_0_is_cancelled_as_it_waits(two, insist):
    session = Session("http://127.0.0.1:1")
    zero = Beside(session.push, two[0])
    time.sleep(0.2)
    session.cancel(insist=insist)
    assert isinstance(zero.outcome(), PushCancelled)
    assert zero.seconds < 5
    session.close()


def test_an_interrupt_of_rank_0_as_it_waits_to_tell_the_others(two):
    """What it has failed for reaches them still."""
    one = []

    def interrupt():
        one.append(Beside(follow, two[1], clock(), lambda: None))
        one[0].thread.join(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Leader(two[0], clock(), interrupt) as leader:
        leader.refuse(ValueError("no such model"))
    assert "rank 0 failed: ValueError: no such model" in str(one[0].outcome())


def test_no_time_left_is_no_agreement(two):
    with Leader(two[0], clock()) as leader, pytest.raises(RankError, match="rank 1 did not come"):
        leader._ask(0.0)


@pytest.fixture
def lockstep(barrier):
    """Two that have to go through their pairs for the specs."""

    def pairs():
        for index in range(4):
            barrier.wait(10)
            yield f"t{index}", torch.zeros(2)

    store = HashStore()
    return [Lockstep(pairs, ranks=Ranks(store, rank, 2)) for rank in range(2)]


def test_without_a_server_nobody_asks_what_tensors_there_are(lockstep):
    sessions = [Session(None) for _ in lockstep]
    pushes = [
        Beside(session.push, source) for session, source in zip(sessions, lockstep, strict=True)
    ]
    assert "needs a server" in str(pushes[0].outcome())
    assert "rank 0 failed: UsageError" in str(pushes[1].outcome())


def test_alone_nobody_asks_what_tensors_there_are(lockstep):
    for rank, to in enumerate(["http://127.0.0.1:1", None]):
        session = Session(to, timeouts=Timeouts(connect=0.3))
        with pytest.raises(RankError, match="did not come within"):
            session.push(lockstep[rank])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_whoever_gives_up_whenever(seed, together):
    """Two to five ranks; ``together`` says whether they begin each push at the same time."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 4, 5])
    store, barrier, gate = HashStore(), threading.Barrier(size), threading.Barrier(size)
    ranks = [Collective(Ranks(store, rank, size), barrier) for rank in range(size)]
    ended = [[] for _ in ranks]

    def giving_up(after):
        until = time.monotonic() + after
        return lambda: time.monotonic() > until and cancelled()

    def push(rank, fault):
        source, (kind, after) = ranks[rank], fault
        source.fails = kind == "specs"
        until = clock(total=after if kind == "limit" else None)
        check = giving_up(after if kind == "cancel" else 60)
        return lead(source, until, check) if rank == 0 else follow(source, until, check)

    def run(rank, faults):
        for fault in faults:
            if together:
                gate.wait(30)
            try:
                ended[rank].append(push(rank, fault))
            except (StreamerError, RuntimeError) as error:
                ended[rank].append(error)

    # In most pushes one or two give up, within the time that a push takes; in the last one none.
    faults = [[("none", 60.0)] * 16 for _ in ranks]
    for number in range(15):
        for rank in chance.sample(range(size), chance.choice([0, 1, 1, min(2, size)])):
            kind = chance.choice(["cancel", "cancel", "limit", "specs"])
            faults[rank][number] = (kind, chance.uniform(0.0001, 0.015))
    threads = [Beside(run, rank, faults[rank]) for rank in range(size)]
    assert [thread.outcome() for thread in threads] == [None] * size
    assert not barrier.broken
    for outcomes in zip(*ended, strict=True):
        assert len({isinstance(outcome, Report) for outcome in outcomes}) == 1
    assert [outcomes[-1] for outcomes in ended] == [REPORT] * size
    assert store.num_keys() <= size + 4
