"""What the two threads of a sync share. How they use it is in the tests of the broadcaster."""

from __future__ import annotations

import threading

import pytest
import torch

from streamer import SourceError, TensorSpec
from streamer.broadcast.fill import Fill
from streamer.broadcast.handover import Handover, Staged
from streamer.plan import make_plan

pytestmark = pytest.mark.timeout(60)


def staged(name, *, in_place=False):
    (chunk,) = make_plan([TensorSpec(name, torch.uint8, (4,))]).chunks
    return Staged(chunk, Fill(torch.zeros(4, dtype=torch.uint8)), in_place=in_place)


def never():
    raise AssertionError("something is there")


@pytest.fixture
def handover():
    return Handover()


@pytest.fixture
def beside(no_threads_left):
    """Runs a step on a thread, and says what it has returned."""
    threads = []

    def start(step):
        results = []
        thread = threading.Thread(target=lambda: results.append(step()))
        thread.start()
        threads.append(thread)

        def result():
            thread.join(20)
            assert not thread.is_alive()
            return results[0]

        return result

    yield start
    for thread in threads:
        thread.join(20)


def test_chunks_come_in_the_order_of_the_offers(handover):
    a, b = staged("a"), staged("b")
    assert handover.offer(a)
    assert handover.offer(b)
    assert handover.waiting() == [a, b]
    assert [handover.next(never), handover.next(never)] == [a, b]
    assert handover.waiting() == []


def test_buffers_come_back_in_that_order_once_they_are_sent(handover, beside):
    a, b, lent = staged("a"), staged("b"), staged("lent", in_place=True)
    for one in (a, lent, b):
        handover.offer(one)
        assert handover.next(never) is one
    first = beside(handover.oldest)
    handover.mark_sent(b)
    assert handover.sent == 1
    handover.mark_sent(lent)
    handover.mark_sent(a)
    assert first() is a
    assert handover.oldest() is b
    assert handover.sent == 3


def test_a_chunk_is_waited_for(handover, beside):
    assert not handover.wait(0.01)
    there = beside(lambda: handover.wait(20))
    handover.offer(staged("a"))
    assert there()


def test_what_was_offered_before_a_failure_still_comes(handover):
    a, error = staged("a"), SourceError("first")
    handover.offer(a)
    handover.fail(error)
    handover.fail(SourceError("second"))
    assert not handover.offer(staged("b"))
    assert handover.wait(0)
    assert handover.next(never) is a
    assert handover.next(never) is None
    assert handover.failure is error


def test_a_source_that_is_late_has_failed(handover):
    late = SourceError("late")
    assert handover.next(lambda: late) is None
    assert handover.failure is late
    # Else it would go out in place of the chunk that comes after the filler.
    assert not handover.offer(staged("a"))


@pytest.mark.parametrize("how", ["end", "fail"])
def test_who_waits_for_a_buffer_is_woken_when_there_is_no_use_in_it(handover, beside, how):
    handover.offer(staged("a"))
    handover.next(never)
    oldest = beside(handover.oldest)
    handover.end() if how == "end" else handover.fail(SourceError("no"))
    assert oldest() is None


@pytest.mark.parametrize("how", ["sent", "end"])
def test_who_lends_a_tensor_waits_until_it_was_sent_or_never_will_be(handover, beside, how):
    lent = staged("a", in_place=True)
    handover.offer(lent)
    handover.next(never)
    # Not when the source fails: the broadcast may read the tensor yet.
    handover.fail(SourceError("no"))
    waits = beside(lambda: handover.wait_until_sent(lent) or lent.sent)
    handover.mark_sent(lent) if how == "sent" else handover.end()
    assert waits() is (how == "sent")


def test_what_a_guarded_block_raises_is_the_failure(handover):
    with handover.guarded():
        raise KeyboardInterrupt
    assert isinstance(handover.failure, KeyboardInterrupt)
