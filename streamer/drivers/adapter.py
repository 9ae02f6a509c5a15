"""Calls over `requests` that can be ended at any moment: by their deadline, or by `cancel`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from requests.adapters import HTTPAdapter

_current = threading.local()
"""``call``: the `Call` under way on this thread."""


class Call:
    """One call under way: the socket it uses, once it has one, and why it was ended, if it was."""

    def __init__(self) -> None:
        self.ended = ""
        self._sock: Any = None
        self._lock = threading.Lock()

    def uses(self, sock: Any) -> None:
        """From now on the call waits for ``sock``; for none if it is through."""
        with self._lock:
            self._sock = sock
            self._break()

    def end(self, why: str) -> None:
        """Break the connection, which wakes whatever waits for it; it raises."""
        with self._lock:
            self.ended = self.ended or why
            self._break()

    def _break(self) -> None:
        if self.ended and self._sock is not None:
            # Not SSLSocket's own shutdown: it takes the TLS layer from under the reading thread.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(getattr(self._sock, "socket", self._sock), socket.SHUT_RDWR)


class CancellableAdapter(HTTPAdapter):
    """Knows the calls under way and their sockets, directly or through a proxy; repeats nothing."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        super().__init__(pool_maxsize=4, max_retries=0)

    @contextlib.contextmanager
    def within(self, timeout: float | None, call: Call) -> Iterator[None]:
        """The block makes one call, which ends as ``late`` after ``timeout`` seconds in all.

        Raises an `OSError` if it was ended.

        The timeouts of `requests` are those of a single read, and a body may trickle for ever.
        """
        timer = threading.Timer(timeout or 0, call.end, ["late"])
        timer.daemon = True
        with self._lock:
            self._calls.add(call)
        _current.call = call
        try:
            if timeout is not None:
                timer.start()
            yield
            if call.ended:  # a broken connection may look like the end of the answer
                raise ConnectionError(call.ended)
        finally:
            timer.cancel()
            call.uses(None)
            _current.call = None
            with self._lock:
                self._calls.discard(call)

    def cancel(self) -> None:
        """End every call under way as ``cancelled``."""
        with self._lock:
            for call in self._calls:
                call.end("cancelled")

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        plain = pool.ConnectionCls
        if not issubclass(plain, _Watched):
            pool.ConnectionCls = type(plain.__name__, (_Watched, plain), {})
        return pool


class _Watched:
    """Mixed into a connection: tells the call under way which socket it waits for."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        _current.call.uses(self.sock)

    def request(self, *args: Any, **kwargs: Any) -> None:
        _current.call.uses(self.sock)
        super().request(*args, **kwargs)  # type: ignore[misc]
