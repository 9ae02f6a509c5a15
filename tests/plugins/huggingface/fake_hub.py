"""A Hub on localhost: the routes, headers and faults of the real one, and its storage elsewhere.

Files are named by repository, commit and path, as on the Hub; weights are redirected to another
port, the "cdn". Every request is written down with the bytes that were sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from safetensors.torch import save

TOKEN = "hf_GoodTokenOfAGoodUser"
INDEX = "model.safetensors.index.json"


@dataclass
class Repo:
    """One model. ``revisions`` are branches and tags; ``commits`` their files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Add a commit, which ``names`` (main) point to from now on."""
        sha = hashlib.sha1(str(len(self.commits)).encode() + b"".join(files.values())).hexdigest()
        self.commits[sha] = files
        self.revisions |= dict.fromkeys(names or ("main",), sha)
        return sha


@dataclass
class Asked:
    """One request, and what was sent for it: ``sent`` bytes of a body that starts at ``start``."""

    host: str
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    start: int = 0
    sent: int = 0


@dataclass
class Fault:
    """What befalls the next ``times`` requests for which ``when`` holds."""

    when: Callable[[Asked], bool]
    times: int = 1
    status: int = 0
    """The answer instead of the right one, with ``headers``."""
    headers: dict[str, str] = field(default_factory=dict)
    silent: float = 0.0
    """Seconds before anything is sent."""
    breaks_after: int | None = None
    """Bytes of the body after which the connection is closed."""
    change: Callable[[bytes], bytes] = bytes
    """What the file is instead, from now on."""


class FakeHub:
    """A Hub and its storage. ``rate`` bounds the bytes a second of all bodies together."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.rate: float | None = None
        self.ranges = True
        self.etag_suffix = ""
        self.stopping = threading.Event()
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._servers = [_serve(self, "hub"), _serve(self, "cdn")]
        self.url, self.cdn = (
            f"http://{server.server_address[0]}:{server.server_address[1]}"
            for server in self._servers
        )

    def stop(self) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def clear(self) -> None:
        """Forget the requests so far."""
        self.asked.clear()

    def fault(self, when: Callable[[Asked], bool], **what: Any) -> Fault:
        self.faults.append(Fault(when, **what))
        return self.faults[-1]

    def bodies(self, file: bytes) -> list[tuple[int, int]]:
        """What was sent of a file that the storage has: sorted ``(start, stop)``."""
        path = "/" + hashlib.sha256(file).hexdigest()
        found = [each for each in self.asked if each.path.startswith(path) and each.sent]
        return sorted((each.start, each.start + each.sent) for each in found)

    # -- answering ---------------------------------------------------------------------------

    def answer(self, handler: BaseHTTPRequestHandler, host: str) -> None:
        """Answer one request."""
        asked = Asked(host, handler.command, unquote(handler.path), dict(handler.headers.items()))
        self.asked.append(asked)
        fault = None
        with self._lock:
            for each in self.faults:
                if each.times and each.when(asked):
                    each.times -= 1
                    fault = each
                    break
        if fault is not None:
            self.stopping.wait(fault.silent)
            if fault.status:
                return self._send(handler, asked, fault.status, fault.headers, b"no")
        status, headers, body = self._cdn(asked) if host == "cdn" else self._hub(asked)
        if fault is not None:
            body = fault.change(body)
        return self._send_range(handler, asked, status, headers, body, fault)

    def _hub(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        path = urlsplit(asked.path).path
        token = asked.headers.get("authorization") or asked.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}", "Bearer hf_stranger"):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        api = re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path)
        resolve = re.fullmatch(r"/([^/]+(?:/[^/]+)?)/resolve/([0-9a-f]{40}|[^/]+)/(.+)", path)
        match = api or resolve
        repo = self.repos.get(match[1]) if match else None
        allowed = token == f"Bearer {TOKEN}"
        if match is None or repo is None or (repo.private and not allowed):
            text = "Repository not found" if token else "Invalid username or password."
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": text}
            return 404 if token else 401, code, b""
        revision = match[2] or "main"
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.commits:
            text = f"Invalid rev id: {revision}"
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": text}, b""
        files = repo.commits[commit]
        if resolve is None:
            info = {"id": match[1], "sha": commit, "siblings": [{"rfilename": n} for n in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if repo.gated and not allowed:
            text = "Access to this model is restricted."
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": text}
            return 403 if token else 401, code, b""
        if match[3] not in files:
            code = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return 404, {**code, "X-Repo-Commit": commit}, b""
        data = files[match[3]]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if not match[3].endswith((".safetensors", ".bin")):
            return 200, headers, data
        digest = hashlib.sha256(data).hexdigest()
        self._blobs[digest] = data
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
        return 302, {**headers, **linked, "Location": f"{self.cdn}/{digest}?Signature=secret"}, b""

    def _cdn(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        digest = urlsplit(asked.path).path.strip("/")
        if asked.headers.get("Authorization") or asked.headers.get("authorization"):
            return 400, {"X-Error-Message": "only one way to sign is allowed"}, b""
        data = self._blobs.get(digest)
        if data is None:
            return 404, {}, b""
        return 200, {"ETag": f'"stored-{digest[:8]}{self.etag_suffix}"'}, data

    def _send_range(
        self,
        handler: BaseHTTPRequestHandler,
        asked: Asked,
        status: int,
        headers: dict[str, str],
        body: bytes,
        fault: Fault | None,
    ) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("Range", ""))
        if status == 200 and wanted and self.ranges:
            asked.start, stop = int(wanted[1]), min(int(wanted[2] or len(body)) + 1, len(body))
            if asked.start >= len(body):
                headers = {**headers, "Content-Range": f"bytes */{len(body)}"}
                return self._send(handler, asked, 416, headers, b"")
            place = f"bytes {asked.start}-{stop - 1}/{len(body)}"
            headers = {**headers, "Content-Range": place}
            status, body = 206, body[asked.start : stop]
        return self._send(handler, asked, status, headers, body, fault)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        asked: Asked,
        status: int,
        headers: dict[str, str],
        body: bytes,
        fault: Fault | None = None,
    ) -> None:
        asked.status = status
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if asked.method == "HEAD":
            return
        end = len(body) if fault is None or fault.breaks_after is None else fault.breaks_after
        for at in range(0, min(end, len(body)), 1 << 16):
            piece = memoryview(body)[at : min(at + (1 << 16), end)]
            if self._throttle(len(piece)):
                handler.close_connection = True
                return
            asked.sent += handler.wfile.write(piece)
        handler.close_connection |= end < len(body)

    def _throttle(self, count: int) -> bool:
        """Wait until ``count`` more bytes may go out; whether the server stops instead."""
        if self.rate is None:
            return self.stopping.is_set()
        with self._lock:
            # Half a second may be caught up with, that the machine was busy with something else.
            self._free_at = max(self._free_at, time.monotonic() - 0.5) + count / self.rate
            wait = self._free_at - time.monotonic()
        return self.stopping.wait(max(wait, 0.0))


def _serve(hub: FakeHub, host: str) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def do_GET(self) -> None:
            hub.answer(self, host)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@dataclass
class Model:
    """A sharded model: its tensors, in the order in which they come, and its repository's files.

    ``weights`` are the names of the files that must be read.
    """

    tensors: dict[str, torch.Tensor]
    files: dict[str, bytes]
    weights: list[str]

    @property
    def raw(self) -> dict[str, bytes]:
        """What must arrive."""
        views = {name: tensor.view(torch.uint8) for name, tensor in self.tensors.items()}
        return {name: view.numpy().tobytes() for name, view in views.items()}


def build_model(shards: int = 2, large: int = 2, size: int = 1 << 20, folder: str = "") -> Model:
    """A model of ``shards`` files, each with ``large`` tensors of ``size`` bytes and small ones."""
    generator = torch.Generator().manual_seed(shards * 1000 + large)
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, bytes] = {}
    where: dict[str, str] = {}
    prefix = folder and f"{folder}/"
    for number in range(1, shards + 1):
        sizes = {f"l{number}.w{i}": size for i in range(large)}
        sizes |= {f"l{number}.norm{i}": 64 + 2 * i for i in range(5)}
        shard = {
            name: torch.randint(0, 256, (sizes[name],), dtype=torch.uint8, generator=generator)
            for name in sorted(sizes)
        }
        shard = {name: data.view(torch.bfloat16) for name, data in shard.items()}
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        files[prefix + file] = save(shard)
        where |= dict.fromkeys(shard, file)
        tensors |= shard
    weights = list(files)
    files[prefix + INDEX] = json.dumps({"metadata": {}, "weight_map": where}).encode()
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"):
        files[prefix + name] = save({"other": torch.ones(3)})
    return Model(tensors, {**files, "config.json": b"{}", "README.md": b"# Model"}, weights)
