"""The threads that servers are called on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from streamer.exceptions import StreamerError, one_line

_CLOSE_SECONDS = 1.0
_Task = tuple[Future[Any], Callable[[], Any]]


class Callers:
    """Runs each step at once, on a thread that is kept for the next one.

    So there are as many threads as steps were under way at one time. They are daemons: a call that
    does not end keeps nobody. The pool of `concurrent.futures` takes nothing any more when the main
    thread has ended; and where it fails to start a thread, it has queued the step already, and
    another thread runs that later. `submit` and `close` are for one thread at a time.
    """

    def __init__(self) -> None:
        # All threads wait at one queue, where they wake one another: each at a queue of its own was
        # slower by a fifth with 64 servers, because all woke at once, for one interpreter.
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, step: Callable[[], Any]) -> Future[Any]:
        """Begin ``step``, which is run once.

        Raises `RuntimeError` if no thread can be started; then ``step`` is not run.
        """
        if not self._idle.acquire(blocking=False):
            name = f"streamer-http_{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[Any] = Future()
        self._tasks.put((future, step))
        return future

    def _work(self) -> None:
        """A thread: task after task."""
        while (task := self._tasks.get()) is not None:
            run(*task)
            del task  # it may hold an error, and with that all that its traceback leads to
            self._idle.release()

    def close(self) -> None:
        """End the threads, each when its step has ended: for that it waits a second. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def run(future: Future[Any], step: Callable[[], Any]) -> None:
    """Run ``step`` in this call, for ``future``."""
    try:
        future.set_result(step())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, step  # the traceback of an error leads to this frame


def no_thread(what: str, error: RuntimeError) -> StreamerError:
    """What to raise where a thread for ``what`` could not be started."""
    return StreamerError(
        f"{what}: cannot start a thread: {one_line(error)}; raise the limit of processes and "
        "threads (ulimit -u)"
    )
