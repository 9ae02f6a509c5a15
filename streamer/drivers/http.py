"""JSON over HTTP to one server: one call, one answer or one error, and a way to cancel."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from streamer.drivers.connection import (
    Call,
    Connection,
    basic_login,
    environment_proxy,
    tls_context,
)
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    UsageError,
)
from streamer.trace import Trace

_MAX_TEXT = 500
_MAX_BODY = 64 << 20
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SHORTEST_SECRET = 4


def normalize_url(url: str) -> str:
    """``url`` without a trailing slash or ``/v1``; a bare ``host:port`` gets ``http://``.

    Raises `UsageError` for what is not an http(s) URL. A path prefix is kept.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = url.isprintable() and parts.scheme in ("http", "https")
        valid = valid and bool(parts.hostname) and parts.port != 0
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

    Environment proxies are ignored unless ``trust_env``. A redirect is an error, and no call is
    ever repeated: a POST that moves weights must not happen twice. ``headers`` go with every call
    and appear in no error, even if the server repeats them. ``ca_bundle`` is the path of the
    certificates to trust in place of the usual ones.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        headers: Mapping[str, str] | None = None,
        ca_bundle: str | None = None,
        trust_env: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self._base = normalize_url(url)
        self.url = hide_user(self._base)
        self._connect_timeout = connect_timeout
        self._trace = trace or Trace()
        for name, value in (headers or {}).items():
            if not _HEADER_NAME.fullmatch(name):
                raise UsageError("the name of a header is not one")
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                raise UsageError(
                    f"header {name}: only printable ASCII can be sent, without blanks around it"
                )
        if ca_bundle is not None and not os.path.exists(ca_bundle):
            raise UsageError(f"there is no CA bundle at {ca_bundle}")
        self._secrets = sorted(_secrets(self._base, headers or {}), key=len, reverse=True)
        self._headers = {"Connection": "close", "User-Agent": "streamer", **(headers or {})}
        parts = urlsplit(self._base)
        if parts.username is not None:
            self._headers["Authorization"] = basic_login(parts.username, parts.password)
        self._parts = parts
        self._context = tls_context(ca_bundle) if parts.scheme == "https" else None
        self._proxy = environment_proxy(self._base) if trust_env else None
        self._calls: set[Call] = set()
        self._lock = threading.Lock()

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
        content = None if body is None else json.dumps(body).encode()
        started = time.monotonic()
        call = Call(timeout)
        with self._lock:
            self._calls.add(call)
        try:
            with self._trace.span(what):
                status, headers, answer = self._exchange(call, what, method, path, content)
            if call.ended:  # a broken connection may look like the end of the answer
                raise ConnectionError(call.ended)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if call.ended:
                raise ServerUnreachable(f"{what}: {call.ended}") from error
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{what}: no answer after {time.monotonic() - started:.1f} s"
                ) from error
            cause = " ".join(self._without_secrets(_cause(error)).split())
            raise ServerUnreachable(f"{what}: {cause}; is the server up?") from error
        finally:
            call.close()
            with self._lock:
                self._calls.discard(call)
        return self._answer(what, status, headers, answer)

    def _exchange(
        self, call: Call, what: str, method: str, path: str, content: bytes | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer. Raises what the connection raises."""
        connection = Connection(
            call,
            self._parts,
            timeout=self._connect_timeout,
            context=self._context,
            proxy=self._proxy,
        )
        headers = self._headers
        if content is not None:
            headers = {**headers, "Content-Type": "application/json"}
        # A kept connection may be closed by the server just as the next call is sent on it, and a
        # POST that was lost so could not be repeated: each call has its own.
        with contextlib.closing(connection):
            response = connection.send_request(method, self._parts.path + path, content, headers)
            with response:
                answer = _read(what, response)
            return response.status, {k.lower(): v for k, v in response.getheaders()}, answer

    def _answer(
        self, what: str, status: int, headers: Mapping[str, str], content: bytes
    ) -> dict[str, Any]:
        if 300 <= status < 400 and "location" in headers:
            target = hide_user(headers["location"].partition("?")[0])
            raise IncompatibleServer(
                f"{what}: redirected to {self._without_secrets(target)}; give that URL instead"
            )
        if status >= 400:
            text = " ".join(self._without_secrets(_text(content)).split())
            text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"
            raise ServerRefused(f"{what}: {status} {text}", status)
        if status < 300:
            value = _json(content) if content.strip() else {}
            if isinstance(value, dict):
                return value
        kind = self._without_secrets(headers.get("content-type", "no content type"))
        raise IncompatibleServer(
            f"{what}: answered {status} with {kind}, not a JSON object; "
            "does this URL lead to an inference server?"
        )

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def cancel(self) -> None:
        """Break every call under way; they raise `ServerUnreachable`. Later calls work."""
        with self._lock:
            for call in self._calls:
                call.end("cancelled")


def _secrets(url: str, headers: Mapping[str, str]) -> Iterator[str]:
    """What a server may have been told, and may repeat, but no error may: in all spellings."""
    values = list(headers.values())
    # The token alone of "Bearer TOKEN", the values alone of "a=b; c=d".
    values += [part for value in headers.values() for part in re.split(r"[\s;,=]+", value)[1:]]
    parts = urlsplit(url)
    user, password = parts.username or "", parts.password or ""
    values += [user, password, unquote(user), unquote(password)]
    try:
        login = f"{unquote(user)}:{unquote(password)}".encode("latin-1")
    except UnicodeError:
        raise UsageError(f"{hide_user(url)}: only Latin-1 can be sent as user:password") from None
    values.append(base64.b64encode(login).decode())
    return (value for value in set(values) if len(value) >= _SHORTEST_SECRET)


def _read(what: str, response: http.client.HTTPResponse) -> bytes:
    content = bytearray()
    while piece := response.read(1 << 16):
        content += piece
        if len(content) > _MAX_BODY:
            raise IncompatibleServer(f"{what}: answered more than {_MAX_BODY >> 20} MiB")
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


def _json(content: bytes) -> Any:
    """The value of a JSON text, None for what is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _text(content: bytes) -> str:
    """What a server said of an error."""
    text = content.decode(errors="replace")
    if "<html" in text[:500].lower():
        return "(an HTML page)"
    value = _json(content)
    if value is None:
        return text
    text = str(value)
    while isinstance(value, dict):
        value = value.get("error") or value.get("message") or value.get("detail")
        text = str(value) if value else text
    return text


def _cause(error: BaseException) -> str:
    """Why a call failed: ``Connection refused``, not the number of it."""
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error) or type(error).__name__
