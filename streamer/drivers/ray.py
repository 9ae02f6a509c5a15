"""Calls of the methods of a Ray actor that holds an engine, vLLM's ``LLM`` or ``AsyncLLM`` for one.

Imported only where a handle of an actor is given; it needs the extra ``streamer[ray]``.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray

from streamer.drivers.calls import refusal
from streamer.exceptions import DeadlineExceeded, ServerUnreachable

_SLICE = 0.2
"""Seconds within which a wait notices that it is cancelled."""


class RayCalls:
    """The methods of one actor. A call that is given up goes on over there.

    An actor with one thread takes the next call when the last has ended.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self.name = name
        self.towards = ray.util.get_node_ip_address()
        self._handle = handle
        self._cancelled = 0
        self._lock = threading.Lock()

    def has(self, method: str) -> bool:
        return hasattr(self._handle, method)

    def parameters(self, method: str) -> Sequence[inspect.Parameter] | None:
        known = getattr(self._handle, "_ray_method_signatures", {}).get(method)
        if known is None:
            return None
        return [one for one in known if not one.name.startswith("_ray")]

    def request(self, key: str, value: dict[str, Any]) -> Any:
        """Nothing of ours: the actor may be without streamer."""
        return SimpleNamespace(**{key: value})

    def call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        what = f"{self.name}.{method}"
        cancelled = self._cancelled
        started = time.monotonic()
        try:
            reference = getattr(self._handle, method).remote(*args, **kwargs)
            while not ray.wait([reference], timeout=_slice(started, timeout))[0]:
                late = timeout is not None and time.monotonic() - started >= timeout
                if late or self._cancelled != cancelled:
                    # Or Ray logs what becomes of it as an error that nobody has looked at.
                    reference.future().add_done_callback(lambda future: future.exception())
                    if late:
                        raise DeadlineExceeded(
                            f"{what}: no answer after {timeout:g} s; look at the actor's log"
                        )
                    raise ServerUnreachable(f"{what}: cancelled")
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise refusal(what, getattr(error, "cause", None) or error) from error
        except ray.exceptions.RayError as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ServerUnreachable(f"{what}: {said} Is the actor alive?") from error
        except TypeError as error:  # the method does not take these arguments, or Ray cannot
            raise refusal(what, error) from error

    def cancel(self) -> None:
        with self._lock:
            self._cancelled += 1

    def close(self) -> None:
        self.cancel()


def _slice(started: float, timeout: float | None) -> float:
    if timeout is None:
        return _SLICE
    return min(_SLICE, max(timeout - (time.monotonic() - started), 0.0))
