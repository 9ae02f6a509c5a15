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


def test_it_can_ask_for_a_key(
    start: Callable[..., subprocess.Popen[str]], run: Callable[..., Any], checkpoint: Path
) -> None:
    """Whoever lacks it is refused, and nobody is shown it."""
    key = "s3cret-key-of-a-server"
    options = ("--workers", "1", "--device", "cpu", "--until-eof")
    process = start("serve", "--port", "0", *options, STREAMER_API_KEY=f"{key}\n")
    url = ready(process)
    bearer = {"Authorization": f"Bearer {key}"}
    assert requests.get(f"{url}/health", timeout=10).status_code == 200
    assert requests.get(f"{url}/version", headers=bearer, timeout=10).status_code == 200
    refused = [
        requests.request(method, url + path, headers=headers, timeout=10)
        for method, path in (("GET", "/version"), ("POST", "/pause"), ("GET", "/no/such/route"))
        for headers in (
            {},
            {"Authorization": f"Bearer {key}x"},
            {"Authorization": f"Bearer {key[:-1]}"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {key}"},
            {"Authorization": key},
        )
    ]
    assert {each.status_code for each in refused} == {401}
    assert {each.headers["www-authenticate"] for each in refused} == {"Bearer"}
    paused = requests.get(f"{url}/is_paused", headers=bearer, timeout=10)
    assert paused.json() == {"is_paused": False}
    denied = run("push", checkpoint, "--to", url)
    wrong = run("push", checkpoint, "--to", url, "--api-key", f"{key}x")
    said = f"GET {url}/version: 401 this server asks for its API key; "
    assert denied.error == f"{said}send its key, as --api-key, STREAMER_API_KEY or headers= do"
    assert wrong.error == f"{said}it does not take the key, or Authorization, that it was sent"
    pushed = run("push", checkpoint, "--to", url, STREAMER_API_KEY=key)
    assert pushed.code == 0
    for worker in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if b"receiver.worker" in (worker.parent / "cmdline").read_bytes():
                assert key.encode() not in worker.read_bytes()
    stdout, stderr = process.communicate(timeout=20)
    said = [stdout, stderr, *(each.text for each in refused)]
    said += [text for ended in (denied, wrong, pushed) for text in (ended.stdout, ended.stderr)]
    assert not [text for text in said if key in text]


@pytest.mark.parametrize("key", [" ", "s3cret\x7f"])
def test_a_key_that_is_none(invoke: Callable[..., Any], key: str) -> None:
    ended = invoke("serve", "--api-key", key)
    assert ended.code == 2
    assert ended.error.startswith("the API key")
    assert "s3cret" not in ended.error


def test_it_listens_on_loopback_alone_unless_told(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("serve", "--port", "0", "--workers", "1", "--device", "cpu", "--until-eof")
    port = int(ready(process).rpartition(":")[2])
    listening = [
        fields[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A" and fields[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]
    process.communicate(timeout=20)


def test_a_taken_port_is_one_line(invoke: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = invoke("serve", "--port", port, "--device", "cpu")
    assert ended.code == 1
    assert ended.error == f"cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize("missing", ["httptools", "starlette", "uvicorn", "uvloop"])
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
    says = f"the reference server needs {missing}: install streamer with its extra, as '.[serve]'"
    assert ended.error == says


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
