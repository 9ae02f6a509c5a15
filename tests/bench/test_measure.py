"""Timing, deadlines, the bound, and the made-up checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

import streamer
from streamer.bench.checkpoint import write_checkpoint
from streamer.bench.machine import commit
from streamer.bench.measure import (
    BROADCAST,
    COPY,
    PUSH,
    READ,
    STAGE,
    Row,
    deadline,
    repeated,
    timed,
)
from streamer.bench.result import Result


def test_the_first_run_is_not_counted() -> None:
    values = iter([9.0, 1.0, 3.0, 2.0])
    assert repeated(lambda: next(values), 3) == (1.0, 3.0, 2.0)


def test_what_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.bench.measure._ENOUGH_SECONDS", 0.02)
    assert len(repeated(timed(lambda: time.sleep(0.03)), 5)) == 1


def test_a_row_is_its_median() -> None:
    row = Row(READ, "1 thread", 1, 3_000_000_000, (1.0, 5.0, 2.0))
    assert (row.median, row.gb_per_s) == (2.0, 1.5)


def test_a_deadline_ends_a_wait_and_leaves_no_trace() -> None:
    before = signal.getsignal(signal.SIGALRM)
    alarm, _ = signal.getitimer(signal.ITIMER_REAL)  # that of pytest-timeout
    with (
        pytest.raises(streamer.DeadlineExceeded, match=r"read: not measured within 0.05 s; give"),
        deadline("read", 0.05),
    ):
        threading.Event().wait(20)
    assert signal.getsignal(signal.SIGALRM) == before
    with deadline("read", 0.05):
        pass
    time.sleep(0.1)
    assert alarm - 10 < signal.getitimer(signal.ITIMER_REAL)[0] < alarm


def row(stage: str, rate: float, device: str = "cpu") -> Row:
    return Row(stage, "x", 0, int(rate * 1e9), (1.0,), device)


def test_the_bound_is_the_slowest_stage_at_its_best_on_the_way_of_the_push() -> None:
    result = Result({}, {})
    assert (result.bound, result.push, result.of_bound) == (None, None, None)
    result.rows = [row(READ, 4), row(READ, 8), row(BROADCAST, 2), row(BROADCAST, 3)]
    assert result.bound == row(BROADCAST, 3)
    result.rows += [row(PUSH, 1.5), row(PUSH, 1)]
    assert result.of_bound == 0.5
    # To workers on GPUs: what Gloo does between CPUs bounds nothing.
    result.rows = [row(READ, 60), row(COPY, 55, "cuda"), row(STAGE, 40, "cuda"), row(BROADCAST, 3)]
    result.rows += [row(PUSH, 30, "cuda")]
    assert result.bound == row(STAGE, 40, "cuda")
    assert result.of_bound == 0.75


@pytest.mark.parametrize("nbytes", [1 << 20, 48 << 20])
def test_a_made_up_checkpoint_has_about_the_size_that_was_asked(
    tmp_path: Path, nbytes: int
) -> None:
    write_checkpoint(tmp_path, nbytes)
    source = streamer.open_source(tmp_path)
    assert sum(spec.nbytes for spec in source.specs()) == pytest.approx(nbytes, rel=0.15)
    assert len(source.specs()) == 72
    source.close()


def test_the_commit_is_that_of_the_sources() -> None:
    found = commit()
    installed = (Path(streamer.__file__).parents[1] / ".git").exists()
    assert (found is not None) == installed
    if found is not None:
        assert int(found.removesuffix("-dirty"), 16)
