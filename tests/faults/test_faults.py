"""Every fault in every phase of a sync, into a real server of two worker processes over Gloo.

``scripts/fault_table.py`` runs this and writes docs/faults.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import NoneType

import pytest

import streamer
from fault_plot import BUFFER_SIZE, CALL_SIZE, Plot, weights
from fault_proxy import Fault
from fault_table import (
    CALLS,
    FILE,
    KINDS,
    LATE,
    NCCL,
    PHASES,
    SOURCE,
    UPDATE,
    Outcome,
    cells,
    not_a_cell,
    outcome,
)
from streamer import Session, StreamerError, Timeouts, racing
from streamer import session as session_module
from streamer.drivers import recovery
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(130)

PATIENT = Timeouts(connect=30, progress=30)
SHORT = Timeouts(connect=4, progress=1.5)
SOON, LATER = 6.0, 12.0
"""Seconds within which a fault is told: that is seen at once, and that only a deadline ends."""
GONE = 10.0 if NCCL else 70.0
"""Seconds in which threads end: an operation that Gloo was left with has its own timeout, 60 s."""
OLD, NEW, NEXT = weights(1), weights(2), weights(3)
SUMS = {
    name: {key: hashlib.sha256(bytes(value.tolist())).hexdigest() for key, value in each.items()}
    for name, each in (("old", OLD), ("new", NEW))
}


@pytest.fixture(autouse=True)
def small_plans_and_deadlines(monkeypatch):
    plain = session_module.make_plan
    monkeypatch.setattr(
        session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=CALL_SIZE)
    )
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 1.0)
    monkeypatch.setattr(racing, "ANSWER_SECONDS", 0.5)


def state_of(server) -> Outcome:
    """What ``server`` does and holds now, of the tensors of the table: others pushed to it too."""
    sums = server.post("/weight_checker", {"action": "checksum"}).get("checksums")
    weights = [
        name
        for name, each in SUMS.items()
        if sums
        and all(
            sums.get(f"{worker}:{key}") == digest
            for worker in range(server.workers)
            for key, digest in each.items()
        )
    ]
    return Outcome(
        weights=weights[0] if weights else "mixture" if sums else "dead",
        paused=server.paused,
        marked=server.weight_version.startswith(INCOMPLETE),
    )


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_a_fault(
    cell, server, proxy, make_source, deferred, tmp_path, monkeypatch, leaks, eventually,
    record_property,
):  # fmt: skip
    expected = outcome(cell)
    state = replace(expected, error=None, says="")
    streamer.push(make_source(OLD), proxy.url, buffer_size=BUFFER_SIZE, weight_version="old")
    before = leaks()
    timeouts = SHORT if cell.kind in LATE else PATIENT
    with Session(proxy.url, timeouts=timeouts, buffer_size=BUFFER_SIZE) as session:
        error = None
        with monkeypatch.context() as patch:
            plot = Plot(cell, NEW, server, tmp_path, patch, make_source, deferred)
            proxy.inject(plot.fault)
            started = time.monotonic()
            try:
                session.push(plot.source, weight_version="new")
            except StreamerError as problem:
                error = problem
            seconds = time.monotonic() - started
        # What happened.
        assert plot.fault.arrived.is_set()
        assert type(error) is (expected.error or NoneType)
        if error is not None:
            assert re.search(expected.says, str(error))
            assert str(error).isprintable()
            assert cell.kind in (*FILE, *SOURCE) or proxy.url in str(error)
        assert seconds < (LATER if cell.kind in LATE else SOON)
        if cell.kind in LATE and error is not None:
            assert seconds > SHORT.progress
        # What it left.
        proxy.heal()
        plot.go_on()
        if cell.kind == "server killed":
            assert expected.weights == "dead"
        else:
            eventually(lambda: state.allows(state_of(server)))
        if expected.weights != "dead" and cell.kind != "server stopped":  # which goes on by itself
            whole = error is not None and cell.finished
            assert ("holds the new weights" in str(error)) == whole
            begun = state.weights != "old" or cell.phase.group == "update"
            torn = state.marked and not whole and begun
            assert ("holds a mixture" in str(error)) == torn
            assert ("is marked incomplete" in str(error)) == state.marked
        record_property("cell", str(cell))
        record_property("error", type(error).__name__ if error is not None else "")
        record_property(
            "text", str(error or "").replace(proxy.url, "URL").replace(str(tmp_path), "")
        )
        record_property("seconds", round(seconds, 2))
        record_property("state", describe(state))
        # The cure.
        if cell.kind.endswith("killed"):
            server.kill()
            server.start()
        session.push(make_source(NEXT), weight_version="next")
        assert server.holds(NEXT)
        assert (server.paused, server.weight_version) == (False, "next")
    plot.source.close()
    proxy.heal()
    if NCCL and cell.phase.group == "init":
        before["fds"] += 2  # that NCCL leaves open where it had begun to join
    with contextlib.suppress(AssertionError):
        eventually(lambda: not grown(before, leaks()), GONE)
    assert grown(before, leaks()) == {}, stacks()


def grown(before: dict[str, int], now: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of."""
    return {name: (before[name], count) for name, count in now.items() if count > before[name]}


def stacks() -> str:
    """What each thread of Python is at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def describe(state: Outcome) -> str:
    """In a word or two."""
    if state.weights == "dead":
        return "dead"
    how = [word for word in ("paused", "marked") if getattr(state, word)]
    return ", ".join([state.weights, *how])


def test_the_table_has_no_gap():
    """Each cell is run, or says why there is none."""
    run = {(cell.phase.name, cell.kind) for cell in cells()}
    for phase in PHASES:
        for kind in KINDS:
            assert ((phase.name, kind) in run) != bool(not_a_cell(phase, kind))


def test_a_sync_of_the_table_has_so_many_calls(server, proxy, make_source):
    """Or "last call" would not be the last."""
    proxy.inject(Fault("/never"))
    streamer.push(make_source(NEW), proxy.url, buffer_size=BUFFER_SIZE)
    assert proxy.calls.count(f"POST {UPDATE}") == CALLS
    proxy.heal()
