"""JSON over HTTP to one server: one call, one answer or one error, and a way to cancel."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
import urllib3

from streamer.drivers.adapter import Call, CancellableAdapter
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
        self._session = requests.Session()
        self._session.trust_env = trust_env
        self._session.verify = ca_bundle or True
        self._session.headers.update(headers or {})
        self._adapter = CancellableAdapter()
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
        call = Call()
        started = time.monotonic()
        try:
            with self._trace.span(what), self._adapter.within(timeout, call):
                response = self._session.request(
                    method,
                    self._base + path,
                    json=body,
                    timeout=(min(self._connect_timeout, timeout or self._connect_timeout), None),
                    allow_redirects=False,
                    stream=True,
                )
                with response:
                    content = _content(what, response)
                status, headers = response.status_code, response.headers
                # An error that is kept must not keep the connection, which the response owns.
                del response
        except (OSError, urllib3.exceptions.HTTPError) as error:  # requests' own are OSErrors
            if call.ended == "late" or isinstance(error, requests.Timeout):
                raise DeadlineExceeded(
                    f"{what}: no answer after {time.monotonic() - started:.1f} s"
                ) from error
            if call.ended:
                raise ServerUnreachable(f"{what}: cancelled") from error
            cause = " ".join(self._without_secrets(_cause(error)).split())
            raise ServerUnreachable(f"{what}: {cause}; is the server up?") from error
        finally:
            # A kept connection may be closed by the server just as the next call is sent on it,
            # and a POST that was lost so could not be repeated.
            self._session.close()
        return self._answer(what, status, headers, content)

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
        self._adapter.cancel()

    def close(self) -> None:
        """Close idle connections. A later call opens a new one."""
        self._session.close()


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


def _content(what: str, response: requests.Response) -> bytes:
    content = bytearray()
    for piece in response.iter_content(1 << 16):
        content += piece
        if len(content) > _MAX_BODY:
            raise IncompatibleServer(f"{what}: answered more than {_MAX_BODY >> 20} MiB")
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
