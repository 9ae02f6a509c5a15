"""What the tests of the core share: sources made of tensors, servers of two kinds, leak checks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from hypothesis import HealthCheck, settings

from streamer import DeferredTensor, Payload, SourceError, TensorSpec, WeightSource

# How long one example takes says nothing on a machine that does other things.
settings.register_profile("streamer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamer")

START_SECONDS = 60
PATIENCE = 20.0
"""How long a test waits for what ought to come within a second or two: the machine may be busy."""


class Tensors(WeightSource):
    """Yields given pairs. ``specs`` are those of the tensors, or ``declared``.

    ``on_step(index)`` is called before each pair is yielded, on the thread that iterates.
    """

    def __init__(
        self,
        pairs: dict[str, Payload] | Sequence[tuple[str, Payload]],
        declared: Sequence[TensorSpec] | None = None,
        on_step: Callable[[int], None] = lambda index: None,
        weight_version: str | None = None,
    ) -> None:
        self.pairs = list(pairs.items()) if isinstance(pairs, dict) else list(pairs)
        self.declared = declared
        self.on_step = on_step
        self.weight_version = weight_version
        self.closed = 0

    def specs(self) -> Sequence[TensorSpec]:
        if self.declared is not None:
            return self.declared
        return [spec_of(name, payload) for name, payload in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        for index, pair in enumerate(self.pairs):
            self.on_step(index)
            yield pair

    def close(self) -> None:
        self.closed += 1


class Bytes(DeferredTensor):
    """A deferred tensor whose bytes are those of ``tensor``. ``on_read`` may sleep or raise."""

    def __init__(
        self, tensor: torch.Tensor, on_read: Callable[[int, int], None] = lambda start, stop: None
    ) -> None:
        self.tensor = tensor
        self.data = logical_bytes(tensor)
        self.on_read = on_read
        self.parts: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        assert not buffer.readonly
        assert buffer.format == "B"
        assert len(buffer) == stop - start
        self.parts.append((start, stop))
        self.threads.add(threading.current_thread().name)
        self.on_read(start, stop)
        buffer[:] = self.data[start:stop]


def spec_of(name: str, payload: Payload) -> TensorSpec:
    tensor = payload if isinstance(payload, torch.Tensor) else payload.tensor  # type: ignore[attr-defined]
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def logical_bytes(tensor: torch.Tensor) -> bytes:
    """The values of ``tensor`` row by row, found by its strides alone; no lazy conj or neg."""
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    size = tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    data = bytes(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())
    first = tensor.storage_offset()
    values = []
    for index in itertools.product(*map(range, tensor.shape)):
        at = first + sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        values.append(data[at * size : (at + 1) * size])
    return b"".join(values)


@pytest.fixture(scope="session")
def make_source() -> type[Tensors]:
    """`Tensors`: a source of given pairs."""
    return Tensors


@pytest.fixture(scope="session")
def deferred() -> type[Bytes]:
    """`Bytes`: a deferred tensor made of a tensor."""
    return Bytes


@pytest.fixture(scope="session")
def bytes_of() -> Callable[[torch.Tensor], bytes]:
    """`logical_bytes`: what must arrive for a tensor, told without the code under test."""
    return logical_bytes


@pytest.fixture(scope="session")
def random_tensor() -> Callable[..., torch.Tensor]:
    """A tensor of any dtype and shape, of random bytes (but 0 and 1 for bool)."""

    def make(dtype: torch.dtype, shape: Sequence[int] = (3, 4), seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = TensorSpec("", dtype, tuple(shape)).nbytes
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
        return data.view(dtype).view(tuple(shape))

    return make


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Wait until ``condition()`` holds; fail with its name after ``seconds``."""

    def wait(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {condition}"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find


def open_files() -> list[str]:
    """What the file descriptors of this process lead to."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


def our_threads() -> list[str]:
    """Names of the threads that streamer has started."""
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("streamer")
    )


@pytest.fixture
def leaks() -> Callable[[], dict[str, int]]:
    """Count what must not grow: descriptors, Python's threads, all of the process's threads."""

    def count() -> dict[str, int]:
        return {
            "fds": len(open_files()),
            "threads": len(our_threads()),
            "tasks": len(os.listdir("/proc/self/task")),
        }

    return count


@pytest.fixture
def no_threads_left(eventually: Callable[..., None]) -> Iterator[None]:
    """None of our threads outlives the test."""
    assert our_threads() == []
    yield
    with contextlib.suppress(AssertionError):
        eventually(lambda: not our_threads(), 10)
    assert our_threads() == []


# A server that answers whatever the test says.


@dataclass
class Call:
    """One request that a `FakeServer` got."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(
    content: object = None,
    status: int = 200,
    headers: dict[str, str] | None = None,
    delay: float = 0.0,
) -> Answer:
    """Answer with JSON (an object), or text or bytes as they are."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        if delay:
            handler.server.stopping.wait(delay)  # type: ignore[attr-defined]
        kind = "text/plain" if isinstance(content, (str, bytes)) else "application/json"
        data = content if isinstance(content, (str, bytes)) else json.dumps(content)
        raw = data.encode() if isinstance(data, str) else data
        with contextlib.suppress(ConnectionError):
            handler.send_response(status)
            given = {"Content-Type": kind, "Content-Length": str(len(raw)), **(headers or {})}
            for name, value in given.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(raw)

    return send


class FakeServer:
    """A real HTTP server. ``routes["GET /version"]`` is an `Answer`; the rest is a 404."""

    def __init__(self) -> None:
        self.routes: dict[str, Answer] = {}
        self.calls: list[Call] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _any(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                call = Call(self.command, self.path, dict(self.headers.items()), None)
                with contextlib.suppress(ValueError):
                    call.body = json.loads(raw) if raw else None
                self.call = call
                fake.calls.append(call)
                path = self.path.partition("?")[0]
                route = fake.routes.get(f"{self.command} {path}")
                (route or answer({"detail": "Not Found"}, 404))(self)

            do_GET = do_POST = _any

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            stopping = threading.Event()

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.stopping = threading.Event()
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def secure(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def paths(self) -> list[str]:
        """The calls so far, as ``GET /version``."""
        return [f"{call.method} {call.path}" for call in self.calls]

    @property
    def posts(self) -> list[str]:
        """The paths of the POSTs so far, in order."""
        return [call.path for call in self.calls if call.method == "POST"]

    def stop(self) -> None:
        self._server.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="session")
def reply() -> Callable[..., Answer]:
    """`answer`: what a route of a `fake_server` says."""
    return answer


@pytest.fixture(scope="session")
def fake_server_class() -> type[FakeServer]:
    """`FakeServer`, for a test that keeps one for longer; stop it."""
    return FakeServer


@pytest.fixture
def start_fake() -> Iterator[Callable[[], FakeServer]]:
    """Start a `FakeServer`; all are stopped at the end."""
    started: list[FakeServer] = []

    def start() -> FakeServer:
        started.append(FakeServer())
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def fake_server(start_fake: Callable[[], FakeServer]) -> FakeServer:
    """One `FakeServer`, without routes."""
    return start_fake()


# The reference server, in a process of its own, that can be told to fail.

GPU = os.environ.get("STREAMER_TEST_GPU", "")
"""The GPU of the shared server, which has one worker then: tests/gpu."""
DEVICE = "cuda" if GPU else "cpu"


def _on_gpu() -> dict[str, str]:
    """The environment of a server there. It is another host than we are if NCCL_HOSTID is set."""
    other = {"NCCL_HOSTID": "receiver"} if "NCCL_HOSTID" in os.environ else {}
    return {"CUDA_VISIBLE_DEVICES": GPU} | other


_REFERENCE = """
import asyncio, json, sys
from streamer.receiver import server

class Faults:
    # Answers a path as it is told, the next so many times, and writes down every call.
    def __init__(self, app, reference):
        self.app, self.reference = app, reference
        self.faults, self.calls, self.kept = {}, [], []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        if path == "/_faults":
            faults = json.loads((await receive())["body"])
            if not faults.pop("keep", False):
                self.faults, self.calls = {}, []
            self.faults.update(faults)
            return await self.answer(send, 200, "{}")
        if path == "/_calls":
            return await self.answer(send, 200, json.dumps(self.calls))
        self.calls.append(scope["method"] + " " + path)
        fault = self.faults.get(path)
        if not fault or not fault["times"]:
            return await self.app(scope, receive, send)
        fault["times"] -= 1
        if fault["inside"]:
            async def drop(message):
                pass
            self.kept.append(asyncio.ensure_future(self.app(scope, receive, drop)))
        await asyncio.sleep(fault["delay"])
        if fault["workers"]:
            await self.reference.call("checksum")
        if fault["status"] == 0:
            return await self.app(scope, receive, send)
        content = json.dumps({"error": {"message": fault["text"], "code": fault["status"]}})
        await self.answer(send, fault["status"], content)

    async def answer(self, send, status, content):
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content.encode()})

plain = server.ReferenceServer.app
server.ReferenceServer.app = lambda self: Faults(plain(self), self)
server.run(
    host="127.0.0.1", port=int(sys.argv[1]), workers=int(sys.argv[2]), device=sys.argv[3],
    discard=False,
    on_ready=lambda url: print("ready", url, flush=True),
)
"""


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
        """Start it, on the port it had before if it had one, and wait until its workers answer."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _REFERENCE, str(self.port), str(self.workers), DEVICE],
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
        expected = {
            name: hashlib.sha256(logical_bytes(tensor)).hexdigest()
            for name, tensor in tensors.items()
        }
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


@pytest.fixture(scope="session")
def source_error() -> type[SourceError]:
    """Shorthand for tests that make sources raise."""
    return SourceError
