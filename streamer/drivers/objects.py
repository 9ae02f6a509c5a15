"""Engines that are objects, in this process or held by Ray actors.

`EngineRoutes` turns the calls of vLLM's dialect into calls of methods, so their order, and all that
is done after a failure, is that of a server behind a URL. Only what the engine is has to be found
out in another way.
"""

from __future__ import annotations

import sys

import torch

from streamer.drivers.base import ServerInfo
from streamer.drivers.calls import Calls
from streamer.drivers.engine import Engine
from streamer.drivers.engine_routes import EngineRoutes
from streamer.drivers.vllm import VllmDriver
from streamer.drivers.vllm_info import check_engine, is_world_size, shown
from streamer.exceptions import IncompatibleServer, UsageError
from streamer.plan import Plan
from streamer.timeouts import Clock
from streamer.trace import Trace

_NAMED = "give streamer.Engine(engine, {}=…)"


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
        self._methods = EngineRoutes(engine.target, calls, trace)
        super().__init__(self._methods, clock=clock, pause=pause, backend=backend, verify=verify)
        self._engine = engine
        self._towards = calls.towards

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
            towards=self._towards,
        )

    def _said(self, attribute: str) -> str | None:
        value = getattr(self._engine.target, attribute, None)
        return str(value) if isinstance(value, str | torch.device) else None

    def _world_size(self, config: object) -> int:
        found: object = self._engine.world_size
        if found is None and self._methods.has("get_world_size"):
            found = self._methods.call("get_world_size", self._clock.progress)
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
        if self._proof is not None and not self._methods.has("compute_weight_checksums"):
            raise IncompatibleServer(
                f"{self.url} has no compute_weight_checksums, without which vLLM's own engine can "
                "prove no arrival: use the streamer backend, or push without verify"
            )
        self._check_dtypes(plan)

    def _can_leave(self) -> bool:
        return self._methods.has("shutdown_weight_transfer_engine")


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
