"""The reference server, in a process of its own, that can be told to fail."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from kit_checks import PATIENCE
from kit_reference_faults import PROGRAM
from kit_sources import checksums_of

START_SECONDS = 60
GPU = os.environ.get("STREAMER_TEST_GPU", "")
"""The GPU of the shared server, which has one worker then: tests/gpu."""
DEVICE = "cuda" if GPU else "cpu"


def _on_gpu() -> dict[str, str]:
    """The environment of a server there. It is another host than we are if NCCL_HOSTID is set."""
    other = {"NCCL_HOSTID": "receiver"} if "NCCL_HOSTID" in os.environ else {}
    return {"CUDA_VISIBLE_DEVICES": GPU} | other


def is_worker(pid: int) -> bool:
    """Whether a process still is a worker of a reference server."""
    try:
        return b"streamer.receiver.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _http() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


@dataclass
class ReferenceServer:
    """A reference server in a process of its own, and its workers (``pids``, in order)."""

    workers: int
    port: int = 0
    url: str = ""
    process: subprocess.Popen[str] = field(init=False)
    pids: list[int] = field(default_factory=list)
    log: Path = field(default=Path(os.devnull))

    def start(self) -> None:
        """Start it, on the port it had before if it had one, and wait until its workers answer.

        Some connection of another test may have got that port meanwhile: it is waited for.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._start()
            except AssertionError as error:
                if "Address already in use" not in str(error) or time.monotonic() > deadline:
                    raise
                self.log.write_text("")
                time.sleep(0.5)

    def _start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(self.port), str(self.workers), DEVICE],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | (_on_gpu() if GPU else {}),
            )
        assert self.process.stdout is not None
        try:
            ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
            assert ready, f"the server did not start within {START_SECONDS} s"
            word, _, self.url = self.process.stdout.readline().strip().partition(" ")
            assert word == "ready", f"the server ended: {self.log.read_text()[-2000:]}"
        except BaseException:
            self.pids = []
            self.kill()
            raise
        self.port = int(self.url.rpartition(":")[2])
        self.pids = self._children()

    def _children(self) -> list[int]:
        pid = self.process.pid
        found: list[int] = []
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return sorted(found)

    def kill(self) -> None:
        """End the server and its workers at once."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        deadline = time.monotonic() + PATIENCE
        while any(map(is_worker, self.pids)):  # they end with their server
            if time.monotonic() > deadline:
                for pid in filter(is_worker, self.pids):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def get(self, path: str) -> Any:
        with _http() as http:
            return http.get(self.url + path, timeout=START_SECONDS).json()

    def post(self, path: str, body: object = None) -> Any:
        with _http() as http:
            return http.post(self.url + path, json=body, timeout=START_SECONDS).json()

    def fail(
        self,
        path: str,
        status: int = 500,
        text: str = "made to fail",
        *,
        delay: float = 0.0,
        inside: bool = False,
        workers: bool = False,
        times: int = 1,
        keep: bool = False,
    ) -> None:
        """Make ``path`` answer so, after ``delay``. Forgets calls and faults, unless ``keep``.

        ``inside``: while the workers do as they are told. ``workers``: once every worker has been
        through with what it does. Status 0 answers as usual afterwards.
        """
        values = {"status": status, "text": text, "delay": delay, "inside": inside}
        values |= {"workers": workers, "times": times}
        self.post("/_faults", {path: values, "keep": keep})

    def heal(self) -> None:
        """No more faults; forget the calls so far."""
        self.post("/_faults", {})

    def restore(self) -> None:
        """As it was when it started, but for the tensors: whatever the last test has left."""
        if self.process.poll() is not None:
            self.kill()
            self.start()
        self.heal()
        try:
            with _http() as http:
                body = {"weight_version": "default"}
                http.post(self.url + "/finish_weight_update", json=body, timeout=3)
                http.post(self.url + "/resume", timeout=3)
                body = {"new_version": "default"}
                http.post(self.url + "/update_weight_version", json=body, timeout=3)
                http.post(self.url + "/shutdown_weight_transfer_engine", timeout=3)
        except requests.RequestException:  # a worker is stuck
            self.kill()
            self.start()
        self.heal()

    @property
    def calls(self) -> list[str]:
        """Calls since the last `fail` or `heal`, as ``POST /pause``."""
        calls: list[str] = self.get("/_calls")
        return calls

    @property
    def weight_version(self) -> str:
        version: str = self.get("/weight_info")["weight_version"]
        return version

    @property
    def paused(self) -> bool:
        paused: bool = self.get("/is_paused")["is_paused"]
        return paused

    def checksums(self) -> list[dict[str, str]]:
        """The checksums of each worker, by name of tensor."""
        found: list[dict[str, str]] = [{} for _ in range(self.workers)]
        for key, digest in self.post("/weight_checker", {"action": "checksum"})[
            "checksums"
        ].items():
            number, _, name = key.partition(":")
            found[int(number)][name] = digest
        return found

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether every worker holds exactly these values under these names."""
        expected = checksums_of(tensors)
        return all(
            {name: held.get(name) for name in expected} == expected for held in self.checksums()
        )


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[int], ReferenceServer]]:
    """Start a reference server of its own for a test that breaks it."""
    started: list[ReferenceServer] = []

    def start(workers: int = 1) -> ReferenceServer:
        server = ReferenceServer(workers, log=tmp_path / f"server{len(started)}.log")
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def _shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceServer]:
    workers = 1 if GPU else 2
    server = ReferenceServer(workers, log=tmp_path_factory.mktemp("server") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def _other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceServer]:
    server = ReferenceServer(1, log=tmp_path_factory.mktemp("server") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(_shared_server: ReferenceServer) -> ReferenceServer:
    """A reference server of two workers, shared by tests that do not end its processes."""
    _shared_server.restore()
    return _shared_server


@pytest.fixture
def other_server(_other_server: ReferenceServer) -> ReferenceServer:
    """A second one, of one worker."""
    _other_server.restore()
    return _other_server
