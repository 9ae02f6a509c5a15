"""The calls of vLLM's dialect as methods of an engine, in this process or through Ray.

What an engine has no method for is left out: one that cannot be paused is not paused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from streamer.drivers.calls import Calls, takes
from streamer.drivers.mark import is_incomplete
from streamer.trace import Trace

_marks: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""Of the engines of this process whose last sync has failed."""


class EngineRoutes:
    """`streamer.drivers.routes.Routes` of an engine. ``url`` is its name.

    See `streamer.drivers.calls.Calls.call` for what is raised. The weight version is kept here for
    an engine that keeps none itself, or takes none; of such a ``target`` the mark of a failed sync
    is there for the next session as well.
    """

    def __init__(self, target: object, calls: Calls, trace: Trace) -> None:
        self.url = calls.name
        self._target = target
        self._calls = calls
        self._trace = trace
        self._paused = False
        self._version = _kept_mark(target)
        self.has = calls.has
        self.cancel = calls.cancel
        self.close = calls.close

    @property
    def can_pause(self) -> bool:
        """See `Routes`, here and below."""
        return self.has("pause_generation")

    def call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        """One call of a method."""
        with self._trace.span(f"{self.url}.{method}"):
            return self._calls.call(method, timeout, *args, **kwargs)

    def init(self, init_info: Mapping[str, Any], timeout: float | None) -> None:
        self._give("init_weight_transfer_engine", timeout, "init_info", dict(init_info))

    def shutdown(self, timeout: float | None) -> None:
        if self.has("shutdown_weight_transfer_engine"):
            self.call("shutdown_weight_transfer_engine", timeout)

    def start(self, timeout: float | None) -> None:
        self.call("start_weight_update", timeout)

    def update(self, update_info: Any, timeout: float | None) -> None:
        self._give("update_weights", timeout, "update_info", update_info)

    def _give(self, method: str, timeout: float | None, key: str, value: dict[str, Any]) -> None:
        parameters = self._calls.parameters(method) or ()
        as_request = [one.name for one in parameters][:1] == ["request"]
        self.call(method, timeout, self._calls.request(key, value) if as_request else value)

    def finish(self, weight_version: str | None, timeout: float | None) -> None:
        method, name = "finish_weight_update", "weight_version"
        named = weight_version is not None and takes(self._calls.parameters(method), name)
        self.call(method, timeout, **({name: weight_version} if named else {}))
        if weight_version is not None:
            if named:
                self._keep(weight_version)
            else:
                self.name_weights(weight_version, timeout)

    def name_weights(self, weight_version: str, timeout: float | None) -> None:
        if self.has("update_weight_version"):
            self.call("update_weight_version", timeout, weight_version)
        self._keep(weight_version)

    def _keep(self, version: str) -> None:
        self._version = version
        with contextlib.suppress(TypeError):  # no weak reference can be made to it
            if is_incomplete(version):
                _marks[self._target] = version
            else:
                _marks.pop(self._target, None)

    def weight_version(self, timeout: float) -> str | None:
        if self.has("get_weight_version") and self.has("update_weight_version"):
            self._version = self.call("get_weight_version", timeout)
        return self._version

    def checksums(self, timeout: float) -> object:
        sums: dict[str, str] = {}
        for worker in self.call("compute_weight_checksums", timeout):
            sums |= worker
        return sums

    def pause(self, mode: str, timeout: float | None) -> None:
        if self.can_pause:
            self._call_with("pause_generation", timeout, "mode", mode)
        self._paused = True

    def resume(self, timeout: float | None) -> None:
        if self.has("resume_generation"):
            self.call("resume_generation", timeout)
        self._paused = False

    def is_paused(self, timeout: float) -> bool:
        if self.has("is_paused"):
            return self.call("is_paused", timeout) is True
        return self._paused

    def version_and_pause(self, timeout: float) -> tuple[str | None, bool]:
        """One after the other: an engine's methods need not stand being called at once."""
        return self.weight_version(timeout), self.is_paused(timeout)

    def reset_prefix_cache(self, running: bool, timeout: float | None) -> None:
        if self.has("reset_prefix_cache"):
            self._call_with("reset_prefix_cache", timeout, "reset_running_requests", running)

    def _call_with(self, method: str, timeout: float | None, key: str, value: object) -> None:
        """One call with an argument, left out only where the method is known not to take it."""
        without = takes(self._calls.parameters(method), key) is False
        self.call(method, timeout, **({} if without else {key: value}))

    def has_died(self, timeout: float) -> bool:
        return False

    def hide(self, text: str) -> str:
        """As it is: no secret goes with a call."""
        return text


def _kept_mark(target: object) -> str | None:
    with contextlib.suppress(TypeError):
        return _marks.get(target)
    return None
