"""A reverse proxy in front of a real server, which spoils one call as it is told."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOLD_SECONDS = 10.0
"""The longest that a call is held back for a test that went wrong."""
TRICKLE_SECONDS = 0.4

Answer = tuple[int, str, bytes]


def _nothing() -> None:
    pass


@dataclass
class Fault:
    """What happens to call number ``nth`` of ``path``.

    ``act`` runs as it arrives. The server is asked ``first``, ``after`` that, ``beside`` it (its
    answer is dropped) or ``never``; then the proxy waits for ``go``, if there is one, and answers
    ``how``, or what the server did where that is empty.
    """

    path: str
    nth: int = 1
    how: str = ""
    asked: str = "after"
    act: Callable[[], None] = _nothing
    go: threading.Event | None = None
    arrived: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """Passes calls on to ``upstream``, but for what `fault` says."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.calls: list[str] = []
        self._fault: Fault | None = None
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy._serve(self, body)

            do_GET = do_POST = _any

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def inject(self, fault: Fault) -> None:
        """From now on ``fault`` is waited for; forgets the calls so far."""
        with self._lock:
            self._healed = threading.Event()
            self._fault = fault
            self._seen.clear()
            self.calls.clear()

    def heal(self) -> None:
        """No more faults; drops every call that is being held back."""
        with self._lock:
            self._fault = None
            self._healed.set()
            for connection in self._open:
                sock = connection.sock
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        path = handler.path.partition("?")[0]
        with self._lock:
            self.calls.append(f"{handler.command} {path}")
            self._seen[path] += 1
            fault, healed = self._fault, self._healed
            hit = fault is not None and (fault.path, fault.nth) == (path, self._seen[path])
        if fault is None or not hit:
            self._answer(handler, self._ask(handler, body))
            return
        fault.arrived.set()
        answer: Answer | None = None
        if fault.asked == "first":
            answer = self._ask(handler, body)
        elif fault.asked == "beside":
            threading.Thread(target=self._ask, args=(handler, body), daemon=True).start()
        fault.act()
        if fault.asked == "after":
            answer = self._ask(handler, body)
        if fault.go is not None:
            fault.go.wait(HOLD_SECONDS)
        try:
            self._spoil(handler, fault.how, answer, healed)
        finally:
            fault.done.set()

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer | None:
        """What the server answers, None if nothing."""
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc)
        with self._lock:
            self._open.add(connection)
        try:
            headers = {
                name: value
                for name, value in handler.headers.items()
                if name.lower() not in ("host", "connection")
            }
            connection.request(handler.command, handler.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type", ""), answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(
        self, handler: BaseHTTPRequestHandler, answer: Answer | None, slowly: bool = False
    ) -> None:
        if answer is None:
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        status, kind, data = answer
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        pieces = [data[i : i + 1] for i in range(len(data))] if slowly else [data]
        for piece in pieces:
            if slowly:
                threading.Event().wait(TRICKLE_SECONDS / len(pieces))
            handler.wfile.write(piece)

    def _spoil(
        self,
        handler: BaseHTTPRequestHandler,
        how: str,
        answer: Answer | None,
        healed: threading.Event,
    ) -> None:
        page = b"<!doctype html><html><body>welcome</body></html>"
        said: dict[str, Answer] = {
            "500": (500, "application/json", json.dumps({"error": "made to fail"}).encode()),
            "404": (404, "application/json", json.dumps({"detail": "Not Found"}).encode()),
            "HTML page": (200, "text/html", page),
            "garbage": (200, "application/json", b'{"version": \xff\x00'),
        }
        if how in said:
            self._answer(handler, said[how])
        elif how == "echo":
            text = json.dumps({"error": f"bad credentials: {dict(handler.headers.items())}"})
            self._answer(handler, (500, "application/json", text.encode()))
        elif how == "moved":
            target = (
                f"https://{handler.headers['X-Api-Key']}:x@elsewhere/{handler.headers['X-Api-Key']}"
            )
            handler.send_response(307)
            handler.send_header("Location", target)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif how == "closed":
            self._answer(handler, None)
        elif how == "never":
            healed.wait()
        else:
            self._answer(handler, answer, slowly=how == "slow")
