"""Checks of one server: only GETs, of which none changes anything."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from streamer.defaults import ENGINES
from streamer.doctor.finding import Finding, fail, ok, warn
from streamer.drivers.http import HttpClient
from streamer.drivers.mark import is_incomplete
from streamer.drivers.vllm_info import (
    CONFIGURE_SO,
    OLDEST,
    SERVER_INFO,
    Setup,
    is_world_size,
    shown,
    version_numbers,
)
from streamer.exceptions import DeadlineExceeded, ServerRefused, ServerUnreachable, StreamerError
from streamer.network import resolve
from streamer.options import Options

_POSTS = (
    "/init_weight_transfer_engine",
    "/pause",
    "/update_weight_version",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
)
_GETS = ("/get_world_size", SERVER_INFO, "/weight_info", "/is_paused")
_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
_CONFIG = f"start the server with {CONFIGURE_SO}"
_KEY = "give its key with --api-key or STREAMER_API_KEY, or its header with --header"

Answer = dict[str, Any] | StreamerError


class Server:
    """What a server has answered, and the checks of that. ``timeout`` is for each question."""

    def __init__(self, client: HttpClient, options: Options, timeout: float) -> None:
        self.url = client.url
        self._client = client
        self._options = options
        self._timeout = timeout
        self._answers: dict[str, Answer] = {}

    def examine(self) -> Iterator[Finding]:
        """Every check, the first failure of which may make the rest impossible."""
        for check in (self.reachable, self.version, self.health, self.development_mode):
            found = check()
            yield found
            if found.status == "fail":
                return
        yield self.world_size()
        yield self.backend()
        if self._options.verify:
            yield self.proof()
        yield self.paused()
        yield self.complete()
        yield self.settings()

    def _ask(self, path: str) -> Answer:
        if path not in self._answers:
            try:
                self._answers[path] = self._client.get(path, self._timeout)
            except StreamerError as error:
                self._answers[path] = error
        return self._answers[path]

    def _has(self, path: str) -> bool:
        """Whether there is such a route; one for POST alone refuses a GET with a 405."""
        answer = self._ask(path)
        return not (isinstance(answer, ServerRefused) and answer.status == 404)

    def _field(self, path: str, key: str) -> Any:
        answer = self._ask(path)
        return answer.get(key) if isinstance(answer, dict) else None

    def reachable(self) -> Finding:
        """Whether an inference server answers there."""
        answer = self._ask("/version")
        if isinstance(answer, dict):
            return ok("reachable", f"{self.url} answers")
        text = str(answer)
        if isinstance(answer, ServerUnreachable | DeadlineExceeded):
            return fail("reachable", text, "start the server, or correct --to")
        if isinstance(answer, ServerRefused) and answer.status in (401, 403):
            return fail("reachable", text, _KEY)
        return fail("reachable", text, "give the URL of the inference server itself with --to")

    def health(self) -> Finding:
        """Whether its engine and all workers are alive."""
        answer = self._ask("/health")
        if isinstance(answer, dict):
            return ok("health", "its engine and workers are alive")
        if isinstance(answer, ServerRefused) and answer.status == 503:
            return fail(
                "health", "its engine or a worker has died (/health: 503)", "restart the server"
            )
        return warn("health", f"not told: {answer}", "look into the server's log")

    def development_mode(self) -> Finding:
        """Whether the routes are there that a push calls."""
        paths = (*_GETS, *_POSTS)
        answers: dict[str, Answer] = {}
        for path in paths:
            answers[path] = self._ask(path)
            if isinstance(answers[path], DeadlineExceeded):
                break  # the others would be waited for as long, each of them
        missing = [path.partition("?")[0] for path in answers if not self._has(path)]
        if missing:
            text = f"no {', '.join(missing)} (404)"
            return fail("development mode", text, _DEV_MODE)
        for answer in answers.values():
            if isinstance(answer, DeadlineExceeded):
                return fail(
                    "development mode",
                    f"{answer}: an update is under way, or a worker hangs",
                    "wait for the other trainer, or restart the server",
                )
            if isinstance(answer, ServerRefused) and answer.status in (401, 403):
                return fail("development mode", str(answer), _KEY)
            if isinstance(answer, StreamerError) and not _is_for_posts(answer):
                return fail("development mode", str(answer), "look into the server's log")
        return ok("development mode", f"all of {len(paths)} routes are there")

    def version(self) -> Finding:
        """Whether we speak its dialect."""
        version = str(self._field("/version", "version") or "")
        numbers = version_numbers(version)
        if not numbers:
            text = f"/version names none, but {shown(version)}"
            return fail("version", text, "give the URL of a vLLM server")
        text = f"vLLM {version:.60}"
        if numbers < OLDEST:
            return fail("version", text, "upgrade the server to vLLM 0.30 or later")
        return ok("version", f"{text}: the dialect of 0.30 and later")

    def world_size(self) -> Finding:
        """How many workers will join."""
        size = self._field("/get_world_size", "world_size")
        if not is_world_size(size):
            text = f"/get_world_size names no count of workers, but {shown(size)}"
            return fail("world size", text, _DEV_MODE)
        return ok("world size", f"{size}, and {size + 1} ranks with this one")

    @property
    def setup(self) -> Setup:
        """What it says of itself; nothing if it does not."""
        answer = self._ask(SERVER_INFO)
        return Setup.parse(answer if isinstance(answer, dict) else {})

    def backend(self) -> Finding:
        """Which engine receives."""
        engine, device = self.setup.backend, self.setup.device
        if engine is None:
            return fail("backend", "none: no weights can be received", _CONFIG)
        if engine not in ENGINES:
            return fail("backend", f"{shown(engine)}, which streamer does not send to", _CONFIG)
        if self._options.backend not in ("auto", engine):
            return fail(
                "backend",
                f"{engine}, and --backend {self._options.backend} was asked for",
                f"leave --backend away, or give {engine}",
            )
        if engine == "nccl" and device == "cpu":
            return fail(
                "backend",
                "nccl on a CPU, where it cannot receive",
                "install streamer beside vLLM, and start it with "
                '--weight-transfer-config \'{"backend": "streamer"}\'',
            )
        whose = "our own" if engine == "streamer" else "vLLM's own: no trainer may die in a sync"
        return ok("backend", f"{engine} on {device} ({whose})")

    def proof(self) -> Finding:
        """Whether the arrival of weights can be proven."""
        if self.setup.backend == "streamer":
            return ok("proof of arrival", "every worker tells a digest")
        if not self._has("/weight_checker"):
            return fail(
                "proof of arrival",
                "no /weight_checker (404)",
                "upgrade the server to vLLM 0.32 or later, or push without --verify",
            )
        return ok("proof of arrival", "by checksums before and after, which take their time")

    def paused(self) -> Finding:
        """Whether it answers requests."""
        paused = self._field("/is_paused", "is_paused")
        if not isinstance(paused, bool):
            return fail(
                "paused", f"/is_paused says {shown(paused)}", "give the URL of a vLLM server"
            )
        if not paused:
            return ok("paused", "no: it answers requests")
        if is_incomplete(self._mark()):
            return warn("paused", "yes, by a sync that failed", "push again: that resumes it")
        return warn(
            "paused",
            "yes, and not by a sync: a push leaves it so",
            "POST /resume to it once it shall answer",
        )

    def _mark(self) -> str:
        return str(self._field("/weight_info", "weight_version") or "")

    def complete(self) -> Finding:
        """Whether it holds one version of the weights, not a mixture."""
        mark = self._mark()
        if not is_incomplete(mark):
            return ok("complete", f"it serves {self._shown(mark) or 'weights without a name'}")
        text = f"marked {self._shown(mark)}: it may hold a mixture"
        several = self._field("/get_world_size", "world_size") != 1
        if several and self.setup.backend == "nccl":
            return warn(
                "complete",
                f"{text}, and its workers may be out of step",
                "restart it if the next push fails",
            )
        return warn("complete", text, "push again")

    def _shown(self, mark: str) -> str:
        return f"{self._client.hide(mark):.100}"

    def identities(self) -> set[Hashable]:
        """What is this server's alone."""
        if self.setup.instance:
            return {self.setup.instance}
        client, path = self._client, urlsplit(self.url).path
        return {(address, client.port, path) for address in resolve(client.host)}

    def settings(self) -> Finding:
        """Versions and settings that decide over NCCL."""
        setup = self.setup
        return ok("settings there", describe(setup.torch, setup.nccl, setup.environment))


def each_once(servers: Sequence[Server]) -> Finding:
    """Whether no two URLs lead to one server, whose workers would be counted twice, and join once.

    A server that does not tell its instance, as vLLM does, is known by the address and port that
    its URL leads to.
    """
    name, seen = "each once", dict[Hashable, str]()
    for server in servers:
        for identity in server.identities():
            if identity in seen:
                text = f"{seen[identity]} and {server.url} lead to one server"
                return fail(name, text, "give each server once with --to")
        seen |= dict.fromkeys(server.identities(), server.url)
    return ok(name, f"{len(servers)} servers")


def _is_for_posts(error: StreamerError) -> bool:
    return isinstance(error, ServerRefused) and error.status == 405


def describe(torch: str, nccl: str, environment: dict[str, str] | None) -> str:
    """Versions, and what is set of NCCL's."""
    shown = [f"{name}={value}" for name, value in sorted((environment or {}).items())]
    return ", ".join(
        [
            f"torch {torch or 'unknown'}",
            f"NCCL {nccl or 'unknown'}",
            " ".join(shown) if shown else "no NCCL_* set" if environment is not None else "",
        ]
    ).removesuffix(", ")
