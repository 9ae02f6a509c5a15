"""`Timeouts`, and what a push has left of them."""

from __future__ import annotations

import time

import pytest

from streamer import DeadlineExceeded, ServerRefused, Timeouts, UsageError
from streamer.held import Held
from streamer.timeouts import LONGEST, Clock, seconds


@pytest.mark.parametrize("name", ["connect", "progress", "total"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "5", 10**6 + 1, 9e9])
def test_what_is_no_time_is_refused(name, value):
    with pytest.raises(UsageError, match=f"^the {name} timeout must be a time in seconds, not "):
        Timeouts(**{name: value})


def test_the_longest_fits_into_what_counts_milliseconds_in_32_bits():
    Timeouts(connect=LONGEST, progress=LONGEST, total=LONGEST)
    assert LONGEST * 1000 < 1 << 31


@pytest.mark.parametrize("name", ["connect", "progress"])
def test_only_the_whole_may_take_for_ever(name):
    Timeouts(total=None)
    with pytest.raises(UsageError, match=f"^the {name} timeout must .* not None$"):
        Timeouts(**{name: None})


def test_a_step_has_what_is_left_of_the_whole():
    clock = Clock(Timeouts(connect=30, progress=60, total=50))
    assert (clock.connect, clock.progress) == (30, 60)
    clock.start()
    assert clock.connect == 30
    assert 49 < clock.progress <= 50
    clock.stop()
    assert clock.progress == 60


def test_a_push_that_takes_longer_than_its_limit():
    clock = Clock(Timeouts(total=1e-9))
    clock.start()
    with pytest.raises(DeadlineExceeded, match=r"^the push took longer than its limit of 1e-09 s$"):
        clock.check()


def ended(*clocks, error=None):
    error = error or DeadlineExceeded("no answer")
    return [str(clock.told(error)) for clock in clocks]


def test_who_was_waited_for_is_not_told_when_the_push_had_no_more_time():
    cut, patient, idle = (Clock(Timeouts(progress=p, total=0.05)) for p in (60, 0.01, 60))
    for clock in (cut, patient):
        clock.start()
        assert clock.progress <= 0.05
        assert ended(clock) == ["no answer"]
    time.sleep(0.06)
    limit = "the push took longer than its limit of 0.05 s"
    # The second one has waited no longer than for any step; the third has not begun.
    assert ended(cut, patient, idle) == [limit, "no answer", "no answer"]
    assert ended(cut, error=ServerRefused("GET /: 500", 500)) == ["GET /: 500"]
    assert ended(cut, error=KeyboardInterrupt()) == [""]


def test_what_is_told_keeps_what_the_servers_hold_and_is_told_once():
    clock = Clock(Timeouts(total=0.05))
    clock.start()
    assert clock.progress
    time.sleep(0.06)
    error = DeadlineExceeded("no answer")
    error.held = {"http://a": Held("holds nothing")}
    error.add_note("and more")
    told = clock.told(error)
    assert (told.held, told.__notes__, told.__cause__) == (error.held, ["and more"], error)
    assert clock.told(told) is told


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0012856, "0.0013"), (2.5, "2.5"), (9.99, "10"), (59.9873, "60"), (86400, "86400")],
)
def test_a_time_is_shown_in_two_digits_or_whole(value, text):
    assert seconds(value) == text
