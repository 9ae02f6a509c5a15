"""One HTTP call on a connection of its own, that can be ended at any moment: late, or cancelled.

Over `http.client`: all calls share the interpreter's lock, and a push to 64 servers is some 600 of
them. With 64 servers the control plane took 7.3 times as long as with one over `requests`, 3.4
times over `urllib3`, and 2.2 times over `http.client` (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any
from urllib.parse import urlsplit

from streamer.drivers.secrets import basic_login
from streamer.exceptions import UsageError

MAX_ANSWER = 64 << 20
"""Bytes of an answer and its head. The longest are checksums: some 130 bytes for a parameter."""
_COARSE = 0.1
"""Seconds by which a deadline may be missed."""


class AnswerTooLong(http.client.HTTPException):
    """The server has sent more than `MAX_ANSWER`."""


class Call:
    """One call under way: its deadline, its socket, and why it was ended, if it was.

    ``timeout`` is for all of it: a body may trickle for ever, each piece in time.
    """

    def __init__(self, timeout: float | None) -> None:
        self.ended = ""
        self._started = time.monotonic()
        self._deadline = None if timeout is None else self._started + timeout
        self._watched: socket.socket | None = None
        self._lookup: Future[list[Any]] | None = None
        self._received = 0
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def left(self) -> float | None:
        """Seconds until the deadline, if there is one. Raises `TimeoutError` after it."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def connect(self, host: str, port: int, timeout: float) -> _Socket:
        """A connection to the first address of ``host`` that answers, each within ``timeout``.

        So is the name: raises `socket.gaierror` if no name server has answered by then.
        """
        failure: OSError | None = None
        for family, kind, protocol, _, address in self._addresses(host, port, timeout):
            sock = _Socket(family, kind, protocol)
            sock.call = self
            try:
                self.watch(sock)
                sock.settimeout(min(timeout, self.left() or timeout))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError as error:
                sock.close()
                failure = error
                if self.ended:
                    break
        assert failure is not None
        raise failure

    def _addresses(self, host: str, port: int, timeout: float) -> list[Any]:
        """What `socket.getaddrinfo` says of ``host``; `end` wakes it."""
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        # No name server is asked for these, and a thread costs more than the rest of the call.
        if host == "localhost":
            return look_up()
        with contextlib.suppress(socket.gaierror):
            return look_up(flags=socket.AI_NUMERICHOST)
        # The system's call has its own patience, and cannot be broken: it is left behind.
        found: Future[list[Any]] = Future()
        with self._lock:
            self._lookup = found
            self._break()
        threading.Thread(
            target=_settle, args=(found, look_up), name="streamer-resolver", daemon=True
        ).start()
        try:
            return found.result(min(timeout, self.left() or timeout))
        except CancelledError:
            raise ConnectionError(self.ended) from None
        except TimeoutError:  # as the system says it in the end
            text = "Temporary failure in name resolution"
            raise socket.gaierror(socket.EAI_AGAIN, text) from None

    def watch(self, sock: socket.socket) -> None:
        """``sock`` is what is shut down when the call is ended."""
        with self._lock:
            self._watched = sock
            self._break()

    def end(self, why: str) -> None:
        """Break the connection, which wakes whatever waits for it; it raises."""
        with self._lock:
            self.ended = self.ended or why
            self._break()

    def _break(self) -> None:
        if self.ended and self._lookup is not None:
            self._lookup.cancel()
        if self.ended and self._watched is not None:
            with contextlib.suppress(OSError):
                self._watched.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The call is over."""
        with self._lock:
            watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()

    def limit(self, sock: socket.socket) -> None:
        """Give the next read of ``sock`` the time that is left, to a tenth of a second: each change
        is a system call."""
        left, limit = self.left(), sock.gettimeout()
        if left is None or limit is None or not 0 <= limit - left < _COARSE:
            sock.settimeout(left)

    def count(self, received: int) -> int:
        """``received``, of a read. Raises `AnswerTooLong` if the answer is.

        Counted here, nothing that a server says of lengths matters: `http.client` takes a chunk of
        -1 bytes for all that may come, and any number of heads before the answer's own.
        """
        self._received += received
        if self._received > MAX_ANSWER:
            raise AnswerTooLong
        return received


def _settle(found: Future[list[Any]], look_up: Callable[[], list[Any]]) -> None:
    with contextlib.suppress(InvalidStateError):  # the call was ended meanwhile
        try:
            addresses = look_up()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(addresses)


class _Socket(socket.socket):
    """Gives every read the time that its call has left, and counts what it brings."""

    call: Call

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.call.limit(self)
        return self.call.count(super().recv_into(*args, **kwargs))


class _TlsSocket(ssl.SSLSocket):
    """The same over TLS."""

    call: Call

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.call.limit(self)
        return self.call.count(super().recv_into(*args, **kwargs))


class Connection(http.client.HTTPConnection):
    """A connection for one ``call`` to ``host``, through ``proxy`` if there is one."""

    def __init__(
        self,
        call: Call,
        host: str,
        port: int,
        *,
        timeout: float,
        context: ssl.SSLContext | None,
        proxy: str | None = None,
    ) -> None:
        self._call = call
        self._name = host
        self._connect_timeout = timeout
        self._context = context
        self._absolute = ""
        self._pieces: list[bytes] | None = None
        self._more: dict[str, str] = {}
        if proxy is None:
            super().__init__(host, port)
            return
        proxy_host, proxy_port, login = _parse_proxy(proxy)
        super().__init__(proxy_host, proxy_port)
        if context is None:
            name = f"[{host}]" if ":" in host else host
            self._absolute = f"http://{name}" if port == 80 else f"http://{name}:{port}"
            self._more = login
        else:
            self.set_tunnel(f"[{host}]" if ":" in host else host, port, login)

    def connect(self) -> None:
        """Called by `http.client` when it needs the connection."""
        sock: socket.socket = self._call.connect(self.host, self.port, self._connect_timeout)
        self.sock = sock
        if self._context is None:
            return
        if self._tunnel_host:  # type: ignore[attr-defined]
            self._tunnel()  # type: ignore[attr-defined]
        # A descriptor of its own: that of ``sock`` passes to TLS, whose own shutdown would take the
        # layer from under the reading thread.
        self._call.watch(sock.dup())
        wrapped = self._context.wrap_socket(sock, server_hostname=self._name)
        assert isinstance(wrapped, _TlsSocket)
        wrapped.call = self._call
        self.sock = wrapped

    def send_request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> None:
        """Send the one request of this connection; `getresponse` reads the head of its answer."""
        self.connect()
        self._pieces = []
        self.request(method, self._absolute + path, body, {**headers, **self._more})
        self._call.limit(self.sock)
        # A server may refuse before it has read everything, and its answer can still be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(b"".join(self._pieces))

    def send(self, data: Any) -> None:
        """Called by `http.client` with head and body, which go out as one: to send is to wait for
        the interpreter's lock, which all calls of a push to many servers share."""
        if self._pieces is None:
            super().send(data)
        else:
            self._pieces.append(data)


def tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Trusts the certificates at ``ca_bundle``, by default those that `requests` trusts.

    Raises `UsageError` if there are none.
    """
    from requests.utils import DEFAULT_CA_BUNDLE_PATH

    path = ca_bundle or DEFAULT_CA_BUNDLE_PATH
    try:
        return _tls_context(path, os.stat(path).st_mtime_ns)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"no CA certificates can be read from {path} ({error.strerror}): give a PEM file"
        ) from error


@functools.lru_cache(maxsize=4)  # it takes 20 ms, and there may be many servers
def _tls_context(path: str, changed: int) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=path)
    context.sslsocket_class = _TlsSocket
    return context


def environment_proxy(url: str) -> str | None:
    """The proxy that HTTP_PROXY and its like give for ``url``."""
    from requests.utils import get_environ_proxies, select_proxy

    return select_proxy(url, get_environ_proxies(url))


def _parse_proxy(proxy: str) -> tuple[str, int, dict[str, str]]:
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        valid = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.hostname is None:
        raise UsageError("the environment's proxy is not an http:// one: only these are supported")
    login = {}
    if parts.username is not None:
        login["Proxy-Authorization"] = basic_login(parts.username, parts.password)
    return parts.hostname, parts.port or 80, login
