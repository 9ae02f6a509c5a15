"""Calls of an object's methods that can be given up: at their deadline, or by `cancel`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Protocol

from streamer.exceptions import (
    DeadlineExceeded,
    ServerRefused,
    ServerUnreachable,
    UsageError,
    one_line,
)
from streamer.timeouts import seconds

_MAX_TEXT = 500


class Calls(Protocol):
    """The methods of one engine, wherever it is. ``name`` is the engine's, for errors."""

    name: str
    towards: str
    """This host's address as the engine's workers reach it, for all that is known."""

    def has(self, method: str) -> bool:
        """Whether the engine has this method."""

    def parameters(self, method: str) -> Sequence[inspect.Parameter] | None:
        """Its parameters; None if they cannot be told."""

    def request(self, key: str, value: dict[str, Any]) -> Any:
        """What a parameter called ``request`` is given."""

    def call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        """Call it and return what it returns, within ``timeout`` seconds if that is given.

        Raises `ServerRefused` for what it raises, `DeadlineExceeded`, and `ServerUnreachable` if it
        was cancelled, or nobody is there any more.
        """

    def cancel(self) -> None:
        """Wake every call under way on another thread; it raises."""

    def close(self) -> None:
        """Cancel, and free threads."""


class Request(dict[str, Any]):
    """A request as vLLM's engines take it: some read an attribute, some a key."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class LocalCalls:
    """Calls of an object in this process, one after another on a daemon thread of its own.

    One after another because few engines bear two calls at once. A method cannot be ended from
    outside: the caller of one that is given up goes on, and the next call waits for its end, within
    its own deadline. A coroutine is run on ``loop``, and cancelled there when it is given up.
    """

    def __init__(
        self, target: object, name: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.name = name
        self.towards = "127.0.0.1"
        self._target = target
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: set[Future[Any]] = set()
        self._running: Future[Any] | None = None
        self._awaited: Future[Any] | None = None  # what it waits for, of the loop
        self._under_way = ""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def has(self, method: str) -> bool:
        return callable(getattr(self._target, method, None))

    def parameters(self, method: str) -> Sequence[inspect.Parameter] | None:
        try:
            return tuple(inspect.signature(getattr(self._target, method)).parameters.values())
        except (TypeError, ValueError):
            return None

    def request(self, key: str, value: dict[str, Any]) -> Any:
        return Request({key: value})

    def call(self, method: str, timeout: float | None, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.add(future)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="streamer-engine", daemon=True
                )
                self._thread.start()
        started = time.monotonic()
        self._jobs.put((method, lambda: self._result(method, *args, **kwargs), future))
        what = f"{self.name}.{method}"
        try:
            return future.result(timeout)
        except CancelledError:
            raise ServerUnreachable(f"{what}: cancelled") from None
        except TimeoutError as error:
            if future.cancel():  # or else it is the method's own
                with self._lock:
                    if self._running is future and self._awaited is not None:
                        self._awaited.cancel()
                behind = self._under_way
                raise DeadlineExceeded(
                    f"{what}: no answer after {seconds(time.monotonic() - started)} s"
                    + (f", behind {behind}, which does not end" if behind != method else "")
                    + "; look at the engine's log"
                ) from None
            raise refusal(what, error) from error
        except UsageError:
            raise
        except BaseException as error:
            raise refusal(what, error) from error
        finally:
            with self._lock:
                self._waiting.discard(future)

    def _result(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._target, method)(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            if inspect.iscoroutine(result):
                result.close()
            raise UsageError(
                f"{self.name}.{method} is a coroutine: push with streamer.apush or aconnect from "
                "the event loop of the engine, or give Engine(..., loop=)"
            )
        coroutine = _awaiting(result)
        try:
            awaited = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise
        with self._lock:
            self._awaited = awaited
            if self._running is not None and self._running.cancelled():
                awaited.cancel()
        return awaited.result()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            method, step, future = job
            with self._lock:
                self._under_way, self._running, self._awaited = method, future, None
            # One that was given up before its turn must not happen at all.
            if not future.cancelled():
                with contextlib.suppress(InvalidStateError):
                    try:
                        result = step()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        future.set_result(result)
            del job, step, future

    def cancel(self) -> None:
        with self._lock:
            for future in self._waiting:
                future.cancel()
            if self._awaited is not None:
                self._awaited.cancel()

    def close(self) -> None:
        self.cancel()
        self._jobs.put(None)


def takes(parameters: Sequence[inspect.Parameter] | None, name: str) -> bool | None:
    """Whether ``name`` can be given by keyword, to ``**kwargs`` too; None if it cannot be told."""
    if parameters is None:
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        one.kind is inspect.Parameter.VAR_KEYWORD or (one.name == name and one.kind in named)
        for one in parameters
    )


async def _awaiting(result: Any) -> Any:
    return await result


def refusal(what: str, error: BaseException) -> ServerRefused:
    """The error of a method, as that of a server which says no."""
    text = one_line(error)
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"
    return ServerRefused(f"{what}: {type(error).__name__}: {text}", 500)
