"""The other direction: our HTTP client as the object that trainers of vLLM's shape are handed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamer.drivers.http import HttpClient
from streamer.drivers.routes import HttpRoutes
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
            raise UsageError('headers must be texts by name, as {"Authorization": "Bearer KEY"}')
        if not timeout > 0:
            raise UsageError(f"timeout must be a time in seconds, not {timeout:g}")
        self._timeout = timeout
        client = HttpClient(
            url,
            connect_timeout=timeout,
            headers=headers,
            ca_bundle=ca_bundle,
            trust_env=trust_env,
            trace=trace,
        )
        self._routes = HttpRoutes(client)
        self.url = client.url

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have the workers join; returns when all have, so the trainer must join meanwhile."""
        with _json("init_info"):
            self._routes.init(init_info, self._timeout)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers leave."""
        self._routes.shutdown(self._timeout)

    def start_weight_update(self) -> None:
        """Open an update."""
        self._routes.start(self._timeout)

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Have the workers receive; returns when they have."""
        with _json("update_info"):
            self._routes.update(update_info, self._timeout)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, and name the weights if a name is given."""
        with _json("weight_version"):
            self._routes.finish(weight_version, self._timeout)

    def get_world_size(self) -> int:
        """How many workers the server has."""
        size = self._routes.get("/get_world_size", self._timeout).get("world_size")
        return check_world_size(self.url, size)

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights that are there."""
        with _json("new_version"):
            self._routes.name_weights(new_version, self._timeout)

    def get_weight_version(self) -> str | None:
        """What the server calls its weights."""
        return self._routes.weight_version(self._timeout)

    def pause_generation(self, mode: str = "keep") -> None:
        """Stop generating; ``keep`` has requests wait, ``wait`` ends them first, ``abort`` cuts."""
        self._routes.pause(mode, self._timeout)

    def resume_generation(self) -> None:
        """Go on generating."""
        self._routes.resume(self._timeout)

    def is_paused(self) -> bool:
        """Whether the server is paused."""
        return self._routes.is_paused(self._timeout)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Drop keys and values of the old weights; those of waiting requests too, if asked."""
        self._routes.reset_prefix_cache(reset_running_requests, self._timeout)

    def cancel(self) -> None:
        """End every call under way on another thread; it raises `ServerUnreachable`."""
        self._routes.cancel()


@contextlib.contextmanager
def _json(name: str) -> Iterator[None]:
    """A call with ``name`` in its body. Raises `UsageError` where that is not JSON."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"this {name} cannot go over HTTP: {one_line(error)}") from error
