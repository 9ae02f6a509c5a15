"""What is begun before torch is there."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamer import UsageError
from streamer.cli import _ahead
from streamer.interrupts import ENDS

OPTIONS: dict[str, Any] = {
    "connect_timeout": 5, "headers": {}, "ca_bundle": None, "trust_env": False
}  # fmt: skip
CUDA = {"vllm_config": {"device_config": {"device": "cuda"}}}
CPU = {"vllm_config": {"device_config": {"device": "cpu"}}}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# What is begun before.


class FakeCuda:
    """A driver library that notes what is asked of it."""

    def __init__(self, init: int = 0) -> None:
        self.init, self.devices = init, list[int]()

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.devices.append(device)
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    library = FakeCuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


def test_nothing_of_it_waits_for_torch() -> None:
    code = "import sys, streamer.cli._ahead, streamer.cli.push; print('torch' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_a_push_asks_before_torch_is_imported(
    invoke: Callable[..., Any],
    fake_server: Any,
    reply: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_server.routes["GET /server_info"] = reply(CPU)

    def import_torch() -> None:
        eventually(lambda: fake_server.paths == ["GET /server_info?config_format=json"])
        raise RuntimeError("not now")

    monkeypatch.setattr("streamer.cli.push.import_torch", import_torch)
    ended = invoke("push", "/no/such/path", "--to", fake_server.url)
    assert (ended.code, ended.stderr) == (1, "streamer: error: RuntimeError: not now\n")


def test_the_context_is_made_where_a_server_has_gpus(
    fake_server: Any, reply: Any, cuda: FakeCuda, eventually: Any
) -> None:
    fake_server.routes["GET /server_info"] = reply(CUDA)
    _ahead.begin_ahead([fake_server.url, fake_server.url], "cuda:3", **OPTIONS)
    eventually(lambda: cuda.devices == [3, 3])


def test_none_is_made_for_a_server_on_cpus(
    fake_server: Any, reply: Any, cuda: FakeCuda, eventually: Any
) -> None:
    fake_server.routes["GET /server_info"] = reply(CPU)
    before = threading.active_count()
    _ahead.begin_ahead([fake_server.url], None, **OPTIONS)
    eventually(lambda: fake_server.paths and threading.active_count() <= before)
    assert cuda.devices == []


@pytest.mark.parametrize(
    ("device", "made"), [(None, [0]), ("cuda", [0]), ("cuda:1", [1]), ("cpu", []), ("cuda:x", [])]
)
def test_which_context(cuda: FakeCuda, device: str | None, made: list[int]) -> None:
    _ahead.make_context(device)
    assert cuda.devices == made


def test_a_driver_that_does_not_work_is_left_alone(cuda: FakeCuda) -> None:
    cuda.init = 100  # CUDA_ERROR_NO_DEVICE
    _ahead.make_context(None)
    assert cuda.devices == []


def test_without_a_driver_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    _ahead.make_context(None)


def test_a_server_that_is_not_there_is_told_by_who_needs_it(free_port: Any) -> None:
    before = threading.active_count()
    _ahead.begin_ahead([f"http://127.0.0.1:{free_port()}"], None, **OPTIONS)
    for thread in threading.enumerate()[before:]:
        thread.join(10)


def test_what_cannot_be_a_server_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="not a server URL"):
        _ahead.begin_ahead(["ftp://host"], None, **OPTIONS)


def test_a_signal_is_not_for_these_threads(
    fake_server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    blocked: list[set[Any]] = []
    monkeypatch.setattr(
        _ahead, "_ask", lambda *_: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    )
    _ahead.begin_ahead([fake_server.url], None, **OPTIONS)
    eventually(lambda: blocked)
    assert set(ENDS) <= blocked[0]
    assert not set(ENDS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_while_torch_is_imported_ends_the_command(
    start: Callable[..., Any], fake_server: Any, reply: Any, checkpoint: Any, eventually: Any
) -> None:
    fake_server.routes["GET /server_info"] = reply(CPU, delay=3)
    process = start("push", checkpoint, "--to", fake_server.url)
    eventually(lambda: fake_server.paths)  # torch is about to be imported
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "streamer: interrupted\n")
