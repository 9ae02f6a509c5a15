"""JSON over HTTP to one server: one call, one answer or one error, and a way to cancel."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3.connection
from requests.adapters import HTTPAdapter

from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    UsageError,
)
from streamer.trace import Trace

_MAX_TEXT = 500


def normalize_url(url: str) -> str:
    """``url`` without a trailing slash or ``/v1``; a bare ``host:port`` gets ``http://``.

    Raises `UsageError` for what is not an http(s) URL. A path prefix is kept.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UsageError(f"not a server URL: {hide_user(url)} (http://host:port is)")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def hide_user(url: str) -> str:
    """``url`` without user name and password."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://…@{tail}" if at and "://" in head else tail if at else url


class HttpClient:
    """Calls to one server. Any thread may call; `cancel` wakes them all with an error.

    Environment proxies are ignored unless ``trust_env``. A redirected POST is an error, and no call
    is ever repeated: a POST that moves weights must not happen twice. ``headers`` go with every
    call and appear in no error. ``verify`` is True, or the path of a CA bundle.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        headers: Mapping[str, str] | None = None,
        verify: bool | str = True,
        trust_env: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self._base = normalize_url(url)
        self.url = hide_user(self._base)
        self._connect_timeout = connect_timeout
        self._trace = trace or Trace()
        self._session = requests.Session()
        self._session.trust_env = trust_env
        self._session.verify = verify
        for name, value in (headers or {}).items():
            if "\n" in f"{name}{value}" or "\r" in f"{name}{value}":
                raise UsageError("a header has a line break in it")
            self._session.headers[name] = value
        self._adapter = _CancellableAdapter()
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)

    @property
    def host(self) -> str:
        """The host name or address of the server."""
        host = urlsplit(self._base).hostname
        assert host is not None
        return host

    @property
    def port(self) -> int:
        """The port of the server."""
        parts = urlsplit(self._base)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        """GET ``path`` and return the JSON object it answers."""
        return self._call("GET", path, None, timeout)

    def post(
        self, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        """POST ``body`` as JSON and return the JSON object it answers ({} for an empty answer).

        Without a ``timeout`` only `cancel` ends it: for a call that lasts while bytes flow.
        """
        return self._call("POST", path, body, timeout)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        what = f"{method} {self.url}{path.partition('?')[0]}"
        started = time.monotonic()
        try:
            with self._trace.span(what):
                response = self._session.request(
                    method,
                    self._base + path,
                    json=body,
                    timeout=(min(self._connect_timeout, timeout or self._connect_timeout), timeout),
                    allow_redirects=method == "GET",
                )
        except requests.Timeout as error:
            raise DeadlineExceeded(
                f"{what}: no answer after {time.monotonic() - started:.1f} s"
            ) from error
        except requests.RequestException as error:
            if self._adapter.cancelled:
                raise ServerUnreachable(f"{what}: cancelled") from error
            raise ServerUnreachable(f"{what}: {_cause(error)}; is the server up?") from error
        return self._answer(what, response)

    def _answer(self, what: str, response: requests.Response) -> dict[str, Any]:
        if response.is_redirect or response.history:
            target = response.headers.get("location") or response.url
            raise IncompatibleServer(
                f"{what}: redirected to {hide_user(target)}; give that URL instead"
            )
        if response.status_code >= 400:
            raise ServerRefused(
                f"{what}: {response.status_code} {_text(response)}", response.status_code
            )
        if not response.content.strip():
            return {}
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            kind = response.headers.get("content-type", "no content type")
            raise IncompatibleServer(
                f"{what}: answered {response.status_code} with {kind}, not a JSON object; "
                "does this URL lead to an inference server?"
            )
        return value

    def cancel(self) -> None:
        """Break every call under way; they raise `ServerUnreachable`. Later calls work."""
        self._adapter.cancel()

    def close(self) -> None:
        """Close idle connections. A later call opens a new one."""
        self._session.close()


def _text(response: requests.Response) -> str:
    """What a server said of an error, in one line."""
    try:
        value = response.json()
    except ValueError:
        text = "(an HTML page)" if "<html" in response.text[:500].lower() else response.text
    else:
        text = str(value)
        while isinstance(value, dict):
            value = value.get("error") or value.get("message") or value.get("detail")
            text = str(value) if value else text
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"


def _cause(error: BaseException) -> str:
    """The innermost reason of a failed request: ``Connection refused``, not five wrappers."""
    seen: BaseException | None = error
    text = ""
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            text = seen.strerror
        elif not isinstance(seen, (requests.RequestException, urllib3.exceptions.HTTPError)):
            text = str(seen) or type(seen).__name__
        seen = seen.__cause__ or seen.__context__
    return text or str(error)


class _CancellableAdapter(HTTPAdapter):
    """Keeps track of the sockets in use, so that a blocked read can be woken."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.cancelled = False
        super().__init__(pool_maxsize=4, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        manager = self.poolmanager
        manager.pool_classes_by_scheme = {
            scheme: type(
                pool.__name__, (pool,), {"ConnectionCls": self._tracked(pool.ConnectionCls)}
            )
            for scheme, pool in manager.pool_classes_by_scheme.items()
        }

    def _tracked(self, connection_class: type) -> type:
        adapter = self

        class Tracked(connection_class):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                with adapter._lock:
                    adapter._live.add(self)

        return Tracked

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        self.cancelled = False
        return super().send(*args, **kwargs)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            for connection in list(self._live):
                sock = getattr(connection, "sock", None)
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
