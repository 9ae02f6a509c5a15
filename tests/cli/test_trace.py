"""``streamer push --trace`` to a file that takes nothing: said in a line, and the push is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
from streamer import StreamerError, Trace

pytestmark = pytest.mark.timeout(60)

FULL = "cannot write the timeline /dev/full: No space left on device"


def test_a_push_whose_timeline_cannot_be_written_has_pushed(
    run: Callable[..., Any], server: Any, checkpoint: Path
) -> None:
    given = ("--to", server.url, "--trace", "/dev/full", "--weight-version", "traced", "--json")
    ended = run("push", checkpoint, *given)
    assert ended.code == 1
    assert ended.stderr == f"streamer: error: {FULL}; the push itself is done\n"
    assert json.loads(ended.stdout)["weight_version"] == "traced"
    assert server.weight_version == "traced"


def test_a_push_that_fails_says_that_first(run: Callable[..., Any], checkpoint: Path) -> None:
    ended = run("push", checkpoint, "--to", "http://127.0.0.1:9", "--trace", "/dev/full")
    assert (ended.code, ended.stdout) == (1, "")
    warning, error = ended.stderr.splitlines()
    assert warning == f"streamer: warning: {FULL}"
    assert error.startswith("streamer: error: GET http://127.0.0.1:9/version: Connection refused")


def test_a_trace_records_unless_it_is_told_not_to(tmp_path: Path, server: Any) -> None:
    for trace, some in ((Trace(), True), (Trace(enabled=False), False)):
        streamer.push({"a": torch.zeros(3)}, server.url, trace=trace)
        trace.write(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = {event["name"].replace(server.url, "") for event in events}
        assert ("POST /resume" in names) is some


def test_a_timeline_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StreamerError, match=r"cannot write the timeline .*: No such file"):
        Trace().write(tmp_path / "nowhere" / "trace.json")


def read(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """What is on each row, and the rows in order."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "streamer"}]
    spans: dict[str, list[str]] = {row: [] for row in rows.values()}
    for event in events:
        if event["ph"] == "X":
            spans[rows[event["tid"]]].append(event["name"])
    return spans, [rows[tid] for tid in sorted(rows)]


def test_a_timeline_has_the_phases_and_the_opening(
    run: Callable[..., Any], server: Any, checkpoint: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    given = ("--to", server.url, "--trace", trace, "--json", "--verify")
    report = json.loads(run("push", checkpoint, *given).stdout)
    spans, rows = read(trace)
    assert spans["phases"] == ["open", "open", "connect", "update", "finish"]
    assert spans["MainThread"][0] == "open source"
    assert rows[:2] == ["phases", "MainThread"]
    events = json.loads(trace.read_text())["traceEvents"]
    row = next(e["tid"] for e in events if e["args"].get("name") == "phases")
    phases = [e for e in events if e["tid"] == row and e["ph"] == "X"]
    assert sum(e["dur"] for e in phases) / 1e6 == pytest.approx(
        report["seconds"]["total"], abs=0.01
    )
    assert phases[-1]["args"]["verify_seconds"] == pytest.approx(
        report["seconds"]["verify"], abs=1e-5
    )


def test_rows_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    trace = Trace()
    for row in ("streamer-read-10", "streamer-read-2", "MainThread", "phases", "host to device"):
        trace.add("x", 0.0, row=row)
    trace.write(tmp_path / "trace.json")
    order = ["phases", "MainThread", "host to device", "streamer-read-2", "streamer-read-10"]
    assert read(tmp_path / "trace.json")[1] == order


def test_a_push_that_does_not_begin_leaves_the_last_timeline(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("the last one")
    ended = invoke("push", "nothere", "--to", "http://127.0.0.1:9", "--trace", trace)
    assert ended.code == 1
    assert trace.read_text() == "the last one"
