"""JSON over HTTP to one server: one call, one answer or one error, and a way to cancel."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from streamer import descriptors
from streamer.drivers.bodies import decode, encode, read, refusal
from streamer.drivers.connection import (
    MAX_ANSWER,
    AnswerTooLong,
    Call,
    Connection,
    environment_proxy,
    tls_context,
)
from streamer.drivers.secrets import Secrets, basic_login, hide_user, is_server_url
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    UsageError,
)
from streamer.timeouts import seconds
from streamer.trace import Trace

HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MAX_TEXT = 500
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""What OpenSSL says, by its release, where plain HTTP answers."""


def normalize_url(url: str) -> str:
    """``url`` without a trailing slash or ``/v1``; a bare ``host:port`` gets ``http://``.

    Raises `UsageError` for what is not an http(s) URL. A path prefix is kept.
    """
    full = url if "://" in url else f"http://{url}"
    if not is_server_url(full):
        raise UsageError(f"not a server URL: {hide_user(url)} (http://host:port is)")
    parts = urlsplit(full)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class HttpClient:
    """Calls to one server. Any thread may call; `cancel` wakes them all with an error.

    Environment proxies are ignored unless ``trust_env``. A redirect is an error, and no call is
    ever repeated: a POST that moves weights must not happen twice. ``headers`` go with every call
    and appear in no error, even if the server repeats them, nor in what it answers, but for a
    weight version. ``ca_bundle`` is the path of the certificates to trust in place of the usual
    ones.
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
        self._trace = trace or Trace(enabled=False)
        headers = headers or {}
        _check_headers(headers)
        if ca_bundle is not None and not os.path.exists(ca_bundle):
            raise UsageError(f"there is no CA bundle at {ca_bundle}")
        self._proxy = environment_proxy(self._base) if trust_env else None
        self._secrets = Secrets(headers, [self._base, self._proxy or ""])
        self._headers = {"Connection": "close", "User-Agent": "streamer", **headers}
        parts = urlsplit(self._base)
        if parts.username is not None:
            self._headers["Authorization"] = basic_login(parts.username, parts.password)
        self.host = parts.hostname or ""
        """The host name or address of the server."""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path
        self._context = tls_context(ca_bundle) if parts.scheme == "https" else None
        self._calls: set[Call] = set()
        self._lock = threading.Lock()

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        """GET ``path`` and return the JSON object it answers."""
        return self.get_all([path], timeout)[0]

    def get_all(self, paths: Sequence[str], timeout: float) -> list[dict[str, Any]]:
        """GET ``paths`` at once, each within ``timeout``, and return what they answer."""
        with self.getting(paths, timeout) as answer:
            return [answer(path) for path in paths]

    @contextlib.contextmanager
    def getting(
        self, paths: Sequence[str], timeout: float
    ) -> Iterator[Callable[[str], dict[str, Any]]]:
        """GET ``paths`` at once; what is given takes one of them and waits for its answer."""
        with contextlib.ExitStack() as calls:
            begun = {
                path: calls.enter_context(self._call("GET", path, None, timeout)) for path in paths
            }
            yield lambda path: begun[path]()

    def post(
        self, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        """POST ``body`` as JSON and return the JSON object it answers ({} for an empty answer).

        Without a ``timeout`` only `cancel` ends it: for a call that lasts while bytes flow.
        """
        with self._call("POST", path, body, timeout) as answer:
            return answer()

    @contextlib.contextmanager
    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> Iterator[Callable[[], dict[str, Any]]]:
        """A call that has been sent, as what waits for its answer."""
        route = path.partition("?")[0]
        what = f"{method} {self.url}{route}"
        content = None if body is None else encode(what, body)
        headers = self._headers
        if content is not None:
            headers = {**headers, "Content-Type": "application/json"}
        call = Call(timeout)
        with self._lock:
            self._calls.add(call)
        try:
            with self._trace.span(what), self._connected(what, call) as connection:
                with self._named(what, call):
                    connection.send_request(method, self._path + path, content, headers)
                yield lambda: self._answer(route, what, *self._receive(what, call, connection))
        finally:
            call.close()
            with self._lock:
                self._calls.discard(call)

    @contextlib.contextmanager
    def _connected(self, what: str, call: Call) -> Iterator[Connection]:
        # A kept connection may be closed by the server just as the next call is sent on it, and a
        # POST that was lost so could not be repeated: each call has its own.
        with self._named(what, call):
            connection = Connection(
                call,
                self.host,
                self.port,
                timeout=self._connect_timeout,
                context=self._context,
                proxy=self._proxy,
            )
        with contextlib.closing(connection):
            yield connection

    def _receive(
        self, what: str, call: Call, connection: Connection
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of the answer."""
        with self._named(what, call):
            with connection.getresponse() as response:
                answer = read(response)
            if call.ended:  # a broken connection may look like the end of the answer
                raise ConnectionError(call.ended)
        return response.status, response.headers, answer

    @contextlib.contextmanager
    def _named(self, what: str, call: Call) -> Iterator[None]:
        """What the connection raises in the block, as an error of ours that names the call."""
        try:
            yield
        except AnswerTooLong:
            raise IncompatibleServer(f"{what}: answered more than {MAX_ANSWER >> 20} MiB") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            # The system's errors are shown as the cause; others may quote the server.
            cause = error if isinstance(error, OSError) and error.errno is not None else None
            if call.ended:
                raise ServerUnreachable(f"{what}: {call.ended}") from cause
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{what}: no answer after {seconds(call.age)} s; look at the server's log"
                ) from cause
            if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
                raise ServerUnreachable(
                    f"{what}: no TLS is spoken there; give the URL with http://"
                ) from cause
            remedy = descriptors.REMEDY if descriptors.ran_out(error) else "is the server up?"
            text = self._quoted(_cause(error))
            raise ServerUnreachable(f"{what}: {text}; {remedy}") from cause

    def _answer(
        self, path: str, what: str, status: int, headers: http.client.HTTPMessage, content: bytes
    ) -> dict[str, Any]:
        if 300 <= status < 400 and "location" in headers:
            target = hide_user(headers["location"].partition("?")[0])
            raise IncompatibleServer(
                f"{what}: redirected to {self._quoted(target)}; give that URL instead"
            )
        if status >= 400:
            text = self._quoted(refusal(content, self._secrets.hide_in_shown))
            raise ServerRefused(f"{what}: {status} {text}{self._key(status)}", status, path)
        if 200 <= status < 300:
            value = decode(content, self._secrets.hide_in_answer) if content.strip() else {}
            if isinstance(value, dict):
                return value
        kind = self._quoted(headers.get("content-type", "no content type"))
        raise IncompatibleServer(
            f"{what}: answered {status} with {kind}, not a JSON object; "
            "does this URL lead to an inference server?"
        )

    def _key(self, status: int) -> str:
        """The remedy of a refusal for want of a key."""
        if status != 401:
            return ""
        if any(name.lower() == "authorization" for name in self._headers):
            return "; it does not take the key, or Authorization, that it was sent"
        return "; send its key, as --api-key, STREAMER_API_KEY or headers= do"

    def hide(self, text: str) -> str:
        """``text`` without what may not be shown: key, password, values of headers."""
        return self._secrets.hide(text)

    def _quoted(self, text: str) -> str:
        """What a server has said, as part of an error."""
        text = " ".join(self.hide(text).split())
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"

    def cancel(self) -> None:
        """Break every call under way; they raise `ServerUnreachable`. Later calls work."""
        with self._lock:
            for call in self._calls:
                call.end("cancelled")


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise UsageError("the name of a header is not one")
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            raise UsageError(
                f"header {name}: only printable ASCII can be sent, without blanks around it"
            )


def _cause(error: BaseException) -> str:
    """Why a call failed: ``Connection refused``, not the number of it."""
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    if type(error) is ValueError:  # of a length; what is told apart is a subclass
        return "the answer is not HTTP"
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error) or type(error).__name__
