"""`Timeouts`, and what a push has left of them."""

from __future__ import annotations

import pytest

from streamer import DeadlineExceeded, Timeouts, UsageError
from streamer.timeouts import LONGEST, Clock


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
