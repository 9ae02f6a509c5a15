"""The calls of vLLM's dialect as methods of an engine, in this process or through Ray.

The order of the calls, and all that is done after a failure, is so that of a server behind a URL.
What an engine has no method for is left out: one that cannot be paused is not paused.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from streamer.drivers.base import ServerInfo
from streamer.drivers.calls import Calls, takes
from streamer.drivers.engine import Engine
from streamer.drivers.mark import is_incomplete
from streamer.drivers.vllm_info import check_engine, is_world_size, shown
from streamer.exceptions import IncompatibleServer, UsageError
from streamer.trace import Trace

_NAMED = "give streamer.Engine(engine, {}=…)"


@dataclass
class _Kept:
    """What an engine does not keep itself, of a sync that has failed."""

    mark: str | None = None
    paused: bool = False


_all_kept: dict[int, _Kept] = {}
"""By the identity of each engine, for every session of this process."""


def _kept_of(target: object) -> _Kept:
    kept = _all_kept.get(id(target))
    if kept is None:
        kept = _Kept()
        with contextlib.suppress(TypeError):  # one that cannot be watched is known to one session
            weakref.finalize(target, _all_kept.pop, id(target), None).atexit = False
            _all_kept[id(target)] = kept
    return kept


class EngineRoutes:
    """`streamer.drivers.routes.Routes` of an engine. ``url`` is its name.

    See `streamer.drivers.calls.Calls.call` for what is raised. The weight version is kept here for
    an engine that keeps none itself, or takes none; of such a one the mark of a failed sync is
    there for the next session as well.
    """

    def __init__(self, engine: Engine, calls: Calls, trace: Trace) -> None:
        self.url = calls.name
        self._engine = engine
        self._calls = calls
        self._trace = trace
        self._names_itself = calls.has("get_weight_version") and self.can_name
        self._kept = _kept_of(engine.target)
        self._version: str | None = None

    @property
    def can_pause(self) -> bool:
        return self._calls.has("pause_generation")

    @property
    def can_name(self) -> bool:
        return self._calls.has("update_weight_version")

    # What each call does is said in `Routes`.

    def ask(self, backend: str, timeout: float) -> ServerInfo:
        config = _config(self._engine.target)
        transfer = getattr(config, "weight_transfer_config", None)
        given = backend if backend != "auto" else self._engine.backend
        found = given or self._said("backend") or getattr(transfer, "backend", None)
        if found is None:
            raise UsageError(
                f"{self.url} does not say which engine receives its weights: "
                f"{_NAMED.format('backend')}, or the option backend, nccl or streamer"
            )
        check_engine(self.url, found)
        device = self._engine.device or self._said("device")
        device = device or getattr(getattr(config, "device_config", None), "device", "cuda")
        kind = str(device).partition(":")[0]
        if kind not in ("cuda", "cpu"):
            raise UsageError(
                f"{self.url} has workers on {device!r:.50}, not on cuda or cpu: "
                f"{_NAMED.format('device')}"
            )
        return ServerInfo(
            self.url,
            _vllm_version(self._engine.target),
            self._world_size(config, timeout),
            str(found),
            kind,
            towards=self._calls.towards,
        )

    def _said(self, attribute: str) -> str | None:
        value = getattr(self._engine.target, attribute, None)
        return str(value) if isinstance(value, str | torch.device) else None

    def _world_size(self, config: object, timeout: float) -> int:
        found: object = self._engine.world_size
        if found is None and self._calls.has("get_world_size"):
            found = self._call("get_world_size", timeout)
        if found is None:
            found = getattr(self._engine.target, "world_size", None)
        if found is None:
            parallel = getattr(config, "parallel_config", None)
            found = getattr(parallel, "world_size_across_dp", None)
        if not is_world_size(found):
            said = "does not say how many" if found is None else f"says that it has {shown(found)}"
            raise UsageError(f"{self.url} {said} workers: {_NAMED.format('world_size')}")
        return found

    def why_unproven(self, info: ServerInfo) -> str:
        if self._calls.has("compute_weight_checksums"):
            return ""
        return (
            "has no compute_weight_checksums, without which vLLM's own engine can prove no "
            "arrival: use the streamer backend, or push without verify"
        )

    def init(self, init_info: Mapping[str, Any], timeout: float | None) -> None:
        self._give("init_weight_transfer_engine", timeout, "init_info", dict(init_info))

    def shutdown(self, timeout: float | None) -> None:
        if self._calls.has("shutdown_weight_transfer_engine"):
            self._call("shutdown_weight_transfer_engine", timeout)

    def start(self, timeout: float | None) -> None:
        self._call("start_weight_update", timeout)

    def update(self, update_info: Any, timeout: float | None) -> None:
        self._give("update_weights", timeout, "update_info", update_info)

    def _give(self, method: str, timeout: float | None, key: str, value: dict[str, Any]) -> None:
        parameters = self._calls.parameters(method) or ()
        as_request = [one.name for one in parameters][:1] == ["request"]
        self._call(method, timeout, self._calls.request(key, value) if as_request else value)

    def finish(self, weight_version: str | None, timeout: float | None) -> None:
        method, name = "finish_weight_update", "weight_version"
        given = weight_version is not None and takes(self._calls.parameters(method), name)
        self._call(method, timeout, **({name: weight_version} if given else {}))

    def name_weights(self, weight_version: str, timeout: float | None) -> None:
        if self.can_name:
            self._call("update_weight_version", timeout, weight_version)
        self._keep(weight_version)

    def _keep(self, version: str) -> None:
        self._version = version
        self._kept.mark = version if is_incomplete(version) else None

    def weight_version(self, timeout: float) -> str | None:
        if self._names_itself:
            said = self._call("get_weight_version", timeout)
            return None if said is None else str(said)
        return self._kept.mark or self._version

    def checksums(self, timeout: float) -> object:
        method = "compute_weight_checksums"
        said = self._call(method, timeout)
        if not isinstance(said, list | tuple) or not all(isinstance(sums, dict) for sums in said):
            raise IncompatibleServer(
                f"{self.url}.{method} returned {shown(said)}, not the checksums of each worker: "
                "push without verify"
            )
        return {name: value for sums in said for name, value in sums.items()}

    def pause(self, mode: str, timeout: float | None) -> None:
        if self.can_pause:
            self._kept.paused = True  # also if it comes late
            self._call_with("pause_generation", timeout, "mode", mode)

    def resume(self, timeout: float | None) -> None:
        if self._calls.has("resume_generation"):
            self._call("resume_generation", timeout)
        self._kept.paused = False

    def is_paused(self, timeout: float) -> bool:
        if self._calls.has("is_paused"):
            return self._call("is_paused", timeout) is True
        return self._kept.paused

    def version_and_pause(self, timeout: float) -> tuple[str | None, bool]:
        """One after the other: an engine's methods need not stand being called at once."""
        return self.weight_version(timeout), self.is_paused(timeout)

    def reset_prefix_cache(self, running: bool, timeout: float | None) -> None:
        if self._calls.has("reset_prefix_cache"):
            self._call_with("reset_prefix_cache", timeout, "reset_running_requests", running)

    def _call_with(self, method: str, timeout: float | None, key: str, value: object) -> None:
        """One call with an argument, left out only where the method is known not to take it."""
        without = takes(self._calls.parameters(method), key) is False
        self._call(method, timeout, **({} if without else {key: value}))

    def _call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        with self._trace.span(f"{self.url}.{method}"):
            return self._calls.call(method, timeout, *args, **kwargs)

    def has_died(self, timeout: float) -> bool:
        return False

    def hide(self, text: str) -> str:
        return text  # no secret goes with a call

    def cancel(self) -> None:
        self._calls.cancel()

    def close(self) -> None:
        self._calls.close()


def _config(target: object) -> object:
    """vLLM's configuration, of an ``AsyncLLM`` or an ``LLM``; None for other engines."""
    inner = getattr(target, "llm_engine", None)
    return getattr(target, "vllm_config", None) or getattr(inner, "vllm_config", None)


def _vllm_version(target: object) -> str:
    """The release of vLLM that the engine is of, empty for other engines."""
    for kind in type(target).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "vllm":
            return str(getattr(sys.modules.get(package), "__version__", ""))
    return ""
