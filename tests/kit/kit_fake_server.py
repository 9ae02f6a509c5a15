"""A server that answers whatever the test says."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


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
