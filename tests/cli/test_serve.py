"""``streamer serve``: the reference server as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

READY = re.compile(r"ready: (http://127\.0\.0\.1:\d+), \d workers? on cpu \(Ctrl-C ends it\)\n")


def ready(process: subprocess.Popen[str]) -> str:
    """The URL of a server that has just started, out of what it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = READY.fullmatch(line)
    assert match is not None, line
    assert process.stdout.readline() == f"push:  streamer push SOURCE --to {match[1]}\n"
    return match[1]


def test_ready_then_ctrl_c_in_a_terminal_ends_it_cleanly(
    start: Callable[..., subprocess.Popen[str]],
    eventually: Callable[..., None],
    children: Callable[[int], list[int]],
) -> None:
    process = start("serve", "--port", "0", "--workers", "2", "--device", "cpu")
    url = ready(process)
    assert requests.get(f"{url}/get_world_size", timeout=10).json() == {"world_size": 2}
    workers = children(process.pid)
    assert len(workers) == 2
    # The trainer that this leads to never comes: the workers are stuck in the attempt to join.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        init = {
            "master_address": "127.0.0.1",
            "master_port": silent.getsockname()[1],
            "rank_offset": 1,
            "world_size": 3,
        }

        def join() -> None:
            with contextlib.suppress(requests.RequestException):
                requests.post(f"{url}/init_weight_transfer_engine", json={"init_info": init})

        stuck = threading.Thread(target=join)
        stuck.start()
        silent.accept()[0].close()
        time.sleep(0.2)
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        seconds = time.monotonic() - started
        stuck.join()
    assert (process.returncode, stderr) == (0, "")
    assert seconds < 5, "2 s where the machine does nothing else"
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_ctrl_c_while_it_starts(
    start: Callable[..., subprocess.Popen[str]],
    eventually: Callable[..., None],
    children: Callable[[int], list[int]],
) -> None:
    process = start("serve", "--port", "0", "--workers", "1", "--device", "cpu")
    eventually(lambda: children(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (0, "")


def test_it_ends_with_its_standard_input(start: Callable[..., subprocess.Popen[str]]) -> None:
    options = ("--workers", "1", "--device", "cpu", "--until-eof")
    process = start("serve", "--port", "0", *options)
    ready(process)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (0, "", "")


def test_a_taken_port_is_one_line(invoke: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = invoke("serve", "--port", port, "--device", "cpu")
    assert ended.code == 1
    assert ended.error == f"cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_without_the_extra_it_says_what_to_install(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, missing: str, command: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("server", "reference"):
        monkeypatch.delitem(sys.modules, f"streamer.receiver.{module}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    ended = invoke(command)
    assert ended.code == 1
    assert ended.error == f"the reference server needs {missing}: pip install 'streamer[serve]'"


def test_more_workers_than_gpus(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ended = invoke("serve", "--workers", "2", "--device", "cuda")
    assert ended.code == 2
    assert "2 workers need a GPU each and torch sees 1" in ended.error


@pytest.mark.parametrize("options", [("--workers", "0"), ("--port", "70000"), ("--device", "tpu")])
def test_bad_options(invoke: Callable[..., Any], options: tuple[str, str]) -> None:
    ended = invoke("serve", *options)
    assert ended.code == 2
    assert options[0] in ended.error


def test_a_worker_that_cannot_start(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ended = invoke("serve", "--port", "0", "--workers", "1", "--device", "cuda")
    assert ended.code == 1
    assert ended.error == "the server did not start: worker 0 has died: restart the server"
