"""``streamer demo``: it shows that weights arrive, and would show it if they did not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamer
from streamer import Report
from streamer.cli._checkpoint import read_checksums, write_checkpoint


def test_both_pushes_arrive_and_nothing_is_left(run: Callable[..., Any], tmp_path: Path) -> None:
    started = time.monotonic()
    ended = run("demo", TMPDIR=str(tmp_path))
    seconds = time.monotonic() - started
    assert (ended.code, ended.stderr) == (0, "")
    rows = [line.split() for line in ended.stdout.splitlines()]
    (packed,) = (row for row in rows if row[:1] == ["packed"])
    (per_tensor,) = (row for row in rows if row[:2] == ["per", "tensor"])
    assert packed[1] == per_tensor[2] == "60"
    assert packed[-3:] == per_tensor[-3:] == ["120", "of", "120"]
    assert "Every tensor arrived in both workers" in ended.stdout
    assert list(tmp_path.iterdir()) == []
    assert seconds < 30


def test_a_push_that_moves_nothing_is_found_out(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Report] = []
    push = streamer.push

    def only_once(*arguments: Any, **options: Any) -> Report:
        if not reports:
            reports.append(push(*arguments, **options))
        return reports[0]

    monkeypatch.setattr(streamer, "push", only_once)
    ended = invoke("demo")
    assert ended.code == 1
    assert "120 of 120" in ended.stdout
    # The empty tensors are equal whatever their values; the rest is not.
    assert "8 of 120" in ended.stdout
    assert ended.stderr.startswith("streamer: error: 112 tensors are not those of the file: ")
    assert ended.stderr.count("\n") == 1


def test_no_server_outlives_it(
    start: Callable[..., subprocess.Popen[str]],
    eventually: Callable[..., None],
    children: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    interrupted = tmp_path / "interrupted"
    interrupted.mkdir()
    for process, number, code in [
        (start("demo", TMPDIR=str(interrupted)), signal.SIGINT, 130),
        (start("demo", TMPDIR=str(tmp_path)), signal.SIGKILL, -9),
    ]:
        eventually(lambda pid=process.pid: children(pid))
        (server,) = children(process.pid)
        eventually(lambda pid=server: len(children(pid)) == 2)
        family = [server, *children(server)]
        os.killpg(process.pid, number)
        assert process.wait(20) == code
        eventually(lambda pids=family: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert list(interrupted.iterdir()) == []


def test_checkpoints_differ_in_every_tensor_that_has_values(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_checkpoint(folder, seed)
        assert len(list(folder.glob("*.safetensors"))) == 2
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert 50e6 < size < 100e6
        found.append(read_checksums(folder))
    first, second = found
    assert first.keys() == second.keys()
    assert len(first) == 60
    assert [name for name in first if first[name] == second[name]] == [
        f"model.layers.{layer}.empty" for layer in range(4)
    ]
