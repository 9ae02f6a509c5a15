"""The calls that a server of vLLM's dialect takes, and how they go over HTTP.

Bodies are strict: an unknown key is a 500.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlencode

from streamer.drivers.base import ServerInfo
from streamer.drivers.http import HttpClient
from streamer.drivers.vllm_info import ASKED, START_SO, ask, version_numbers
from streamer.exceptions import IncompatibleServer, ServerRefused, StreamerError


class Routes(Protocol):
    """One server. Each call has ``timeout`` seconds, or ends only by `cancel` if that is None.

    Any thread may call. Raises `ServerError` or `DeadlineExceeded`, and repeats nothing.
    """

    url: str

    @property
    def can_pause(self) -> bool:
        """Whether `pause` does anything."""

    @property
    def can_name(self) -> bool:
        """Whether `name_weights` tells the server anything; otherwise `finish` has to."""

    def ask(self, backend: str, timeout: float) -> ServerInfo:
        """What the server is. A ``backend`` that is not ``auto`` is taken as given.

        Raises `IncompatibleServer` or `UsageError` where it cannot be used.
        """

    def why_unproven(self, info: ServerInfo) -> str:
        """Why `checksums` cannot be asked, as the end of a sentence; empty if they can."""

    def init(self, init_info: Mapping[str, Any], timeout: float | None) -> None:
        """Have the workers join; returns when all have."""

    def shutdown(self, timeout: float | None) -> None:
        """Have the workers leave, where the server has a way to."""

    def start(self, timeout: float | None) -> None:
        """Open an update."""

    def update(self, update_info: Any, timeout: float | None) -> None:
        """Have the workers receive; returns when they have."""

    def finish(self, weight_version: str | None, timeout: float | None) -> None:
        """Close the update, and name the weights if a name is given."""

    def weight_version(self, timeout: float) -> str | None:
        """What the weights are called."""

    def name_weights(self, weight_version: str, timeout: float | None) -> None:
        """Call them so."""

    def checksums(self, timeout: float) -> object:
        """Those of all parameters, by name, for all that can be relied on."""

    def pause(self, mode: str, timeout: float | None) -> None:
        """Stop generating: see `streamer.options.Options.pause`."""

    def resume(self, timeout: float | None) -> None:
        """Go on generating."""

    def is_paused(self, timeout: float) -> bool:
        """Whether it is paused."""

    def version_and_pause(self, timeout: float) -> tuple[str | None, bool]:
        """`weight_version` and `is_paused`, in the time of one where that can be."""

    def reset_prefix_cache(self, running: bool, timeout: float | None) -> None:
        """Drop keys and values of the old weights; ``running``: those of requests that have begun
        as well, which are computed anew."""

    def has_died(self, timeout: float) -> bool:
        """Whether the server says that its engine, or one of its workers, has died."""

    def hide(self, text: str) -> str:
        """``text`` that may be shown: without the secrets that go with each call."""

    def cancel(self) -> None:
        """Wake every call under way on another thread; it raises. Later calls work."""

    def close(self) -> None:
        """Cancel, and free what is held."""


class HttpRoutes:
    """`Routes` of vLLM's server, which has them with ``VLLM_SERVER_DEV_MODE=1``, and of ours."""

    can_pause = True
    can_name = True

    def __init__(self, client: HttpClient) -> None:
        self.url = client.url
        self._client = client
        self._version: tuple[int, ...] | None = None  # of a server that was asked

    # What each call does is said in `Routes`.

    def ask(self, backend: str, timeout: float) -> ServerInfo:
        with self._explained(), self._client.getting(ASKED, timeout) as get:
            info = ask(get, self.url, backend)
        self._version = version_numbers(info.version)
        return info

    def why_unproven(self, info: ServerInfo) -> str:
        if version_numbers(info.version) >= (0, 32):
            return ""
        return (
            f"runs vLLM {info.version}, whose own engine can prove no arrival before 0.32: "
            "upgrade it, use the streamer backend, or push without verify"
        )

    def init(self, init_info: Mapping[str, Any], timeout: float | None) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info}, timeout)

    def shutdown(self, timeout: float | None) -> None:
        if self._version is None or self._version >= (0, 32):
            self._post("/shutdown_weight_transfer_engine", None, timeout)

    def start(self, timeout: float | None) -> None:
        self._post("/start_weight_update", None, timeout)

    def update(self, update_info: Any, timeout: float | None) -> None:
        self._post("/update_weights", {"update_info": update_info}, timeout)

    def finish(self, weight_version: str | None, timeout: float | None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version}, timeout)

    def weight_version(self, timeout: float) -> str | None:
        return _version_in(self.get("/weight_info", timeout))

    def name_weights(self, weight_version: str, timeout: float | None) -> None:
        self._post("/update_weight_version", {"new_version": weight_version}, timeout)

    def checksums(self, timeout: float) -> object:
        return self._post("/weight_checker", {"action": "checksum"}, timeout).get("checksums")

    def pause(self, mode: str, timeout: float | None) -> None:
        self._post("/pause?" + urlencode({"mode": mode}), None, timeout)

    def resume(self, timeout: float | None) -> None:
        self._post("/resume", None, timeout)

    def is_paused(self, timeout: float) -> bool:
        return self.get("/is_paused", timeout).get("is_paused") is True

    def version_and_pause(self, timeout: float) -> tuple[str | None, bool]:
        with self._explained():
            info, paused = self._client.get_all(["/weight_info", "/is_paused"], timeout)
        return _version_in(info), paused.get("is_paused") is True

    def reset_prefix_cache(self, running: bool, timeout: float | None) -> None:
        query = "?reset_running_requests=true" if running else ""
        self._post(f"/reset_prefix_cache{query}", None, timeout)

    def has_died(self, timeout: float) -> bool:
        try:
            self._client.get("/health", timeout)
        except StreamerError as error:
            return isinstance(error, ServerRefused) and error.status == 503
        return False

    def hide(self, text: str) -> str:
        return self._client.hide(text)

    def cancel(self) -> None:
        self._client.cancel()

    def close(self) -> None:
        self._client.cancel()

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        """Ask for what has no method here."""
        with self._explained():
            return self._client.get(path, timeout)

    def _post(
        self, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        with self._explained():
            return self._client.post(path, body, timeout)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A 404 means that the server was not started with this route, or is another one."""
        try:
            yield
        except ServerRefused as error:
            if error.status != 404:
                raise
            # Every vLLM server has a version, in whatever mode it was started.
            other = error.path == "/version"
            remedy = "give the URL of the inference server itself" if other else START_SO
            raise IncompatibleServer(f"{self.url} has no {error.path} (404): {remedy}") from error


def _version_in(info: Mapping[str, Any]) -> str | None:
    value = info.get("weight_version")
    return None if value is None else str(value)
