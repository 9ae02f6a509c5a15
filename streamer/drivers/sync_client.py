"""The other direction: our HTTP client as the object that trainers of vLLM's shape are handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from streamer.drivers.http import HttpClient
from streamer.drivers.vllm_info import check_world_size
from streamer.exceptions import UsageError, one_line
from streamer.trace import Trace


class WeightSyncClient:
    """One server, as the four methods that vLLM's trainer engines call, and those around them.

    Takes the place of vLLM's own ``HTTPVLLMWeightSyncClient``: no call is repeated, a redirect is
    refused, every call ends after ``timeout`` seconds at the latest, and neither ``headers`` nor a
    password in ``url`` appear in an error. ``ca_bundle`` and ``trust_env`` are those of `connect`.

    Every method blocks until the server has answered, from any thread. Raises `ServerRefused`,
    `ServerUnreachable`, `IncompatibleServer` or `DeadlineExceeded`, and `UsageError` for what is
    not JSON: memory handles of CUDA go to no other host.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 300.0,
        headers: Mapping[str, str] | None = None,
        ca_bundle: str | None = None,
        trust_env: bool = False,
        trace: Trace | None = None,
    ) -> None:
        if headers and not all(isinstance(one, str) for one in [*headers, *headers.values()]):
            raise UsageError("headers must be texts by name")
        if not timeout > 0:
            raise UsageError(f"timeout must be a time in seconds, not {timeout:g}")
        self._timeout = timeout
        self._http = HttpClient(
            url,
            connect_timeout=timeout,
            headers=headers,
            ca_bundle=ca_bundle,
            trust_env=trust_env,
            trace=trace,
        )
        self.url = self._http.url

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have the workers join; returns when all have, so the trainer must join meanwhile."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers leave."""
        self._post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Open an update."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Have the workers receive; returns when they have."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, and name the weights if a name is given."""
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def get_world_size(self) -> int:
        """How many workers the server has."""
        size = self._http.get("/get_world_size", self._timeout).get("world_size")
        return check_world_size(self.url, size)

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights that are there."""
        self._post("/update_weight_version", {"new_version": new_version})

    def get_weight_version(self) -> str | None:
        """What the server calls its weights."""
        version: str | None = self._http.get("/weight_info", self._timeout).get("weight_version")
        return version

    def pause_generation(self, mode: str = "keep") -> None:
        """Stop generating; ``keep`` has requests wait, ``wait`` ends them first, ``abort`` cuts."""
        self._post("/pause?" + urlencode({"mode": mode}))

    def resume_generation(self) -> None:
        """Go on generating."""
        self._post("/resume")

    def is_paused(self) -> bool:
        """Whether the server is paused."""
        return self._http.get("/is_paused", self._timeout)["is_paused"] is True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Drop keys and values of the old weights; those of waiting requests too, if asked."""
        running = "?reset_running_requests=true" if reset_running_requests else ""
        self._post(f"/reset_prefix_cache{running}")

    def cancel(self) -> None:
        """End every call under way on another thread; it raises `ServerUnreachable`."""
        self._http.cancel()

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        try:
            self._http.post(path, body, self._timeout)
        except (TypeError, ValueError) as error:  # of the body, which has one key
            what = ", ".join(body or ())
            raise UsageError(f"this {what} cannot go over HTTP: {one_line(error)}") from error
