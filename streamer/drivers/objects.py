"""Engines that are objects: vLLM's dialect as method calls, in this process or through Ray.

Each route of vLLM's server is one method of its engine. `EngineClient` answers the routes by
calling the methods, so that the order of the calls, and all that is done after a failure, is that
of a server behind a URL. What an engine has no method for is left out: one that cannot be paused is
not paused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl
from weakref import WeakKeyDictionary

import torch

from streamer.drivers.base import ServerInfo
from streamer.drivers.calls import Calls, takes
from streamer.drivers.engine import Engine
from streamer.drivers.mark import is_incomplete
from streamer.drivers.vllm import VllmDriver
from streamer.drivers.vllm_info import check_engine, is_world_size, shown
from streamer.exceptions import IncompatibleServer, UsageError
from streamer.plan import Plan
from streamer.timeouts import Clock
from streamer.trace import Trace

_NAMED = "give streamer.Engine(engine, {}=…)"


_marks: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""Of the engines of this process that have failed last."""


def _kept_mark(target: object) -> str | None:
    with contextlib.suppress(TypeError):  # no weak reference can be made to it
        return _marks.get(target)
    return None


def _keep_mark(target: object, version: str) -> None:
    with contextlib.suppress(TypeError):
        if is_incomplete(version):
            _marks[target] = version
        else:
            _marks.pop(target, None)


class EngineClient:
    """What `HttpClient` is for a URL: routes in, JSON objects out. ``url`` is the engine's name.

    The weight version is kept here for an engine that keeps none itself, or takes none; of such a
    ``target`` the mark of a failed sync is there for the next client as well.
    """

    def __init__(self, target: object, calls: Calls, trace: Trace) -> None:
        self.url = calls.name
        self.calls = calls
        self._target = target
        self._trace = trace
        self._paused = False
        self._version = _kept_mark(target)
        self._routes: dict[str, Callable[..., object]] = {
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/update_weight_version": self._name_weights,
            "/weight_info": self._weight_info,
            "/weight_checker": self._checksums,
            "/pause": self._pause,
            "/is_paused": self._is_paused,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/health": lambda timeout: {},
        }

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        """Answer a question."""
        return self.post(path, None, timeout)

    def post(
        self, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        """Do what the route does; see `streamer.drivers.calls.Calls.call` for what is raised."""
        route, _, query = path.partition("?")
        answer = self._routes[route](timeout, **dict(parse_qsl(query)), **(body or {}))
        return answer if isinstance(answer, dict) else {}

    def get_all(self, paths: Sequence[str], timeout: float) -> list[dict[str, Any]]:
        """One after the other: an engine's methods need not stand being called at once."""
        return [self.get(path, timeout) for path in paths]

    def hide(self, text: str) -> str:
        """As it is: no secret goes with a call."""
        return text

    def cancel(self) -> None:
        """Wake every call under way."""
        self.calls.cancel()

    def call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        """One call of a method."""
        with self._trace.span(f"{self.url}.{method}"):
            return self.calls.call(method, timeout, *args, **kwargs)

    def _init(self, timeout: float | None, init_info: dict[str, Any]) -> None:
        self._give("init_weight_transfer_engine", timeout, "init_info", init_info)

    def _update(self, timeout: float | None, update_info: dict[str, Any]) -> None:
        self._give("update_weights", timeout, "update_info", update_info)

    def _give(self, method: str, timeout: float | None, key: str, value: dict[str, Any]) -> None:
        parameters = self.calls.parameters(method) or ()
        as_request = [one.name for one in parameters][:1] == ["request"]
        self.call(method, timeout, self.calls.request(key, value) if as_request else value)

    def _start(self, timeout: float | None) -> None:
        self.call("start_weight_update", timeout)

    def _finish(self, timeout: float | None, weight_version: str | None) -> None:
        method, name = "finish_weight_update", "weight_version"
        if weight_version is None:
            self.call(method, timeout)
        elif takes(self.calls.parameters(method), name):
            self.call(method, timeout, **{name: weight_version})
            self._version = weight_version
            _keep_mark(self._target, weight_version)
        else:
            self.call(method, timeout)
            self._name_weights(timeout, weight_version)

    def _name_weights(self, timeout: float | None, new_version: str) -> None:
        if self.calls.has("update_weight_version"):
            self.call("update_weight_version", timeout, new_version)
        self._version = new_version
        _keep_mark(self._target, new_version)

    def _weight_info(self, timeout: float | None) -> dict[str, Any]:
        if all(map(self.calls.has, ("get_weight_version", "update_weight_version"))):
            self._version = self.call("get_weight_version", timeout)
        return {"weight_version": self._version}

    def _checksums(self, timeout: float | None, action: str) -> dict[str, Any]:
        sums: dict[str, str] = {}
        for worker in self.call("compute_weight_checksums", timeout):
            sums |= worker
        return {"checksums": sums}

    def _shutdown(self, timeout: float | None) -> None:
        if self.calls.has("shutdown_weight_transfer_engine"):
            self.call("shutdown_weight_transfer_engine", timeout)

    def _pause(self, timeout: float | None, mode: str) -> None:
        if self.calls.has("pause_generation"):
            self._call_with("pause_generation", timeout, "mode", mode)
        self._paused = True

    def _is_paused(self, timeout: float | None) -> dict[str, Any]:
        if self.calls.has("is_paused"):
            return {"is_paused": self.call("is_paused", timeout)}
        return {"is_paused": self._paused}

    def _resume(self, timeout: float | None) -> None:
        if self.calls.has("resume_generation"):
            self.call("resume_generation", timeout)
        self._paused = False

    def _reset_prefix_cache(self, timeout: float | None, reset_running_requests: str) -> None:
        if self.calls.has("reset_prefix_cache"):
            self._call_with("reset_prefix_cache", timeout, "reset_running_requests", True)

    def _call_with(self, method: str, timeout: float | None, key: str, value: object) -> None:
        """One call with an argument, left out only where the method is known not to take it."""
        without = takes(self.calls.parameters(method), key) is False
        self.call(method, timeout, **({} if without else {key: value}))


class ObjectDriver(VllmDriver):
    """One engine that is an object. See `streamer.Engine` for what it is asked, and how."""

    def __init__(
        self,
        engine: Engine,
        calls: Calls,
        *,
        clock: Clock,
        pause: str,
        backend: str,
        verify: bool,
        trace: Trace,
    ) -> None:
        self._client = EngineClient(engine.target, calls, trace)
        super().__init__(self._client, clock=clock, pause=pause, backend=backend, verify=verify)
        self._engine = engine
        self._calls = calls

    @property
    def _left(self) -> str:
        if self._calls.has("pause_generation"):
            return super()._left
        return "cannot be paused: push again before it generates anything"

    def _ask(self) -> ServerInfo:
        config = _config(self._engine.target)
        transfer = getattr(config, "weight_transfer_config", None)
        backend = self._backend if self._backend != "auto" else self._engine.backend
        backend = backend or self._said("backend") or getattr(transfer, "backend", None)
        if backend is None:
            raise UsageError(
                f"{self.url} does not say which engine receives its weights: "
                f"{_NAMED.format('backend')}, or the option backend, nccl or streamer"
            )
        check_engine(self.url, backend)
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
            self._world_size(config),
            str(backend),
            kind,
            towards=self._calls.towards,
        )

    def _said(self, attribute: str) -> str | None:
        value = getattr(self._engine.target, attribute, None)
        return str(value) if isinstance(value, str | torch.device) else None

    def _world_size(self, config: object) -> int:
        found: object = self._engine.world_size
        if found is None and self._calls.has("get_world_size"):
            found = self._client.call("get_world_size", self._clock.progress)
        if found is None:
            found = getattr(self._engine.target, "world_size", None)
        if found is None:
            parallel = getattr(config, "parallel_config", None)
            found = getattr(parallel, "world_size_across_dp", None)
        if not is_world_size(found):
            said = "does not say how many" if found is None else f"says that it has {shown(found)}"
            raise UsageError(f"{self.url} {said} workers: {_NAMED.format('world_size')}")
        return found

    def check(self, plan: Plan) -> None:
        if self._proof is not None and not self._calls.has("compute_weight_checksums"):
            raise IncompatibleServer(
                f"{self.url} has no compute_weight_checksums, without which vLLM's own engine can "
                "prove no arrival: use the streamer backend, or push without verify"
            )
        self._check_dtypes(plan)

    def leave(self) -> None:
        if not self._stuck:
            self._clean_up("/shutdown_weight_transfer_engine")

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
