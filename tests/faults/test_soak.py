"""200 syncs in a row, every tenth of which fails: nothing grows, and the last one verifies."""

from __future__ import annotations

import os
from itertools import cycle
from pathlib import Path

import pytest

from fault_plot import BUFFER_SIZE, CALL_SIZE, Plot, weights
from fault_table import cells, outcome
from streamer import Session, StreamerError, Timeouts
from streamer import session as session_module
from streamer.broadcast import fill, staging

SYNCS, EVERY, SETTLED = 200, 10, 80
GROWTH = 4 << 20
"""Bytes that a process may grow in 120 syncs: what allocators keep is 2 MB after 1,000 as well.
Over NCCL run.sh sets ``MALLOC_MMAP_THRESHOLD_``: else NCCL fills one heap of glibc after another,
with 37 MiB each (tests/gpu/growth.py)."""
SLOT_SIZE = 64 << 10
"""Bytes: pinned slots are made as they are needed, up to 256 MiB, and would hide what grows."""
FAULTS = (
    "begin: start x 500",
    "update: middle x source raises",
    "update: middle x 500",
    "connect: /weight_info x closed",
    "update: last call x read error",
    "update: answer x closed",
    "finish x garbage",
    "update: middle x file truncated",
    "resume x 500",
)


def resident(pid):
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(180)
def test_nothing_grows(
    server, proxy, make_source, deferred, tmp_path, monkeypatch, leaks, eventually, record_property
):
    plain = session_module.make_plan
    monkeypatch.setattr(
        session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=CALL_SIZE)
    )
    for module in (fill, staging):
        monkeypatch.setattr(module, "SLOT_SIZE", SLOT_SIZE)
    pids = [os.getpid(), server.process.pid, *server.pids]
    faults = cycle([cell for name in FAULTS for cell in cells() if str(cell) == name])
    failed = 0

    def counts():
        found = {**leaks(), "keys": session._fleet.group.lifeline.store.num_keys()}
        for pid in pids[1:]:
            found[f"fds of {pid}"] = len(os.listdir(f"/proc/{pid}/fd"))
            found[f"tasks of {pid}"] = len(os.listdir(f"/proc/{pid}/task"))
        return found

    options = {"timeouts": Timeouts(connect=30, progress=30), "buffer_size": BUFFER_SIZE}
    with Session(proxy.url, verify=True, **options) as session:
        for number in range(1, SYNCS + 1):
            if number % EVERY == 5:
                cell = next(faults)
                with monkeypatch.context() as patch:
                    tensors = weights(number)
                    plot = Plot(cell, tensors, server, tmp_path, patch, make_source, deferred)
                    proxy.inject(plot.fault)
                    with pytest.raises(StreamerError) as caught:
                        session.push(plot.source)
                    assert type(caught.value) is outcome(cell).error
                    plot.source.close()
                    proxy.heal()
                    failed += 1
                continue
            report = session.push(make_source(weights(number)), weight_version=f"v{number}")
            assert report.servers[0].verified == "digest"
            if number == SETTLED:
                before, memory = counts(), [resident(pid) for pid in pids]
        eventually(lambda: all(now <= before[name] for name, now in counts().items()))
        growth = [resident(pid) - then for pid, then in zip(pids, memory, strict=True)]
        record_property("growth", repr(growth))
        assert max(growth) < GROWTH
        assert failed == SYNCS // EVERY
        assert server.holds(weights(SYNCS))
        assert (server.paused, server.weight_version) == (False, f"v{SYNCS}")
