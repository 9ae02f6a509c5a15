"""Plain GETs of ranges, which take the token to the Hub and nowhere else."""

from __future__ import annotations

import os
from contextlib import closing
from urllib.parse import urljoin, urlsplit

import requests
from huggingface_hub import constants

from streamer_huggingface.target import Target, Token
from streamer_huggingface.worker import Failure

_MAX_REDIRECTS = 10
_MAX_BODY = 1 << 16
Span = tuple[int, int]
"""Bytes ``[start, stop)`` of a file."""


class Refused(Exception):
    """An answer, and not what was asked for."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason or str(failure.status))
        self.failure = failure


class Web:
    """Connections to a Hub and to where it redirects, at most ``connections`` kept of each.

    Proxies of the environment are obeyed, and SSL_CERT_FILE or REQUESTS_CA_BUNDLE. Thread-safe.
    """

    def __init__(self, target: Target, connections: int) -> None:
        self._target = target
        self._session = requests.Session()
        self._session.headers["User-Agent"] = target.user_agent
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.verify = os.environ.get("SSL_CERT_FILE") or True
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=connections)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)

    def get(self, url: str, span: Span | None) -> list[requests.Response]:
        """Ask for the bytes of ``span``, or for all. The last response is the answer, its body
        unread; those before it redirect to it. Raises `Refused` if they lead nowhere."""
        passed: list[requests.Response] = []
        while len(passed) <= _MAX_REDIRECTS:
            response = self._send(url, span)
            passed.append(response)
            if not response.is_redirect:
                return passed
            with closing(response):
                there = urljoin(url, response.headers["Location"])
                response.raw.read(_MAX_BODY, decode_content=False)
            if url.startswith("https:") and not there.startswith("https:"):
                raise Refused(Failure(reason="redirected from https to http"))
            url = there
        raise Refused(Failure(reason="redirected in a circle"))

    def is_hub(self, url: str) -> bool:
        """Whether a URL is of the Hub itself: same scheme, host and port."""
        return urlsplit(url)[:2] == urlsplit(self._target.endpoint)[:2]

    def _send(self, url: str, span: Span | None) -> requests.Response:
        return self._session.get(
            url,
            headers={"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {},
            # Not None: that would have requests look for a password in ~/.netrc.
            auth=_Bearer(self._target.token if self.is_hub(url) else None),
            stream=True,
            allow_redirects=False,
            timeout=(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._session.close()


class _Bearer(requests.auth.AuthBase):
    """Adds the token, if there is one."""

    def __init__(self, token: Token | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token.reveal()}"
        return request
