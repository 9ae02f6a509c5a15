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
