"""What a server is told and no message may show: user and password, keys, values of headers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from streamer.exceptions import UsageError

_SHORTEST = 4
_WORDS, _VERSION = ("nccl", "streamer", "cuda"), re.compile(r"v?\d*\.\d")
"""Never masked in an answer that is acted on: engine and device names, and version numbers."""
_FIELDS = frozenset(
    {
        "backend",
        "checksums",
        "device",
        "device_config",
        "env_vars",
        "instance_id",
        "is_paused",
        "pip_packages",
        "system_env",
        "torch_version",
        "version",
        "vllm_config",
        "weight_transfer_config",
        "weight_version",
        "world_size",
    }
)
"""Names that are looked for in answers, and so never masked there."""
_KEPT = frozenset({"weight_version"})
"""Fields of an answer that are compared, and written back: who shows one must `hide` it."""


class Secrets:
    """What was sent in ``headers`` and in ``urls`` (of the server and of a proxy), in all
    spellings: a server may repeat it, and what is shown may not.

    Raises `UsageError` for a user or password that cannot be sent.
    """

    def __init__(self, headers: Mapping[str, str], urls: Sequence[str]) -> None:
        told = {*_in_headers(headers), *(secret for url in urls for secret in _in_url(url))}
        spelt = {each for each in told if len(each) >= _SHORTEST}
        for _ in range(2):  # a refusal may quote another one, and be shown as it came
            spelt |= {escaped for each in spelt for escaped in _escaped(each)}
        # The longest first: one may be part of another.
        self._all = sorted(spelt, key=len, reverse=True)
        self._in_answers = [each for each in self._all if not _is_acted_on(each)]

    def hide(self, text: str) -> str:
        """``text`` without any secret, to be shown."""
        return _masked(text, self._all)

    def hide_in_shown(self, value: Any) -> Any:
        """The JSON ``value`` with no secret in its texts and names, to be shown."""
        return _masked_in(value, self._all, frozenset(), frozenset())

    def hide_in_answer(self, value: Any) -> Any:
        """The JSON ``value`` of an answer with no secret in its texts and names, but for what is
        acted on."""
        return _masked_in(value, self._in_answers, _FIELDS, _KEPT)


def hide_user(url: str) -> str:
    """``url`` without user name and password. An ``@`` in the path of a server's URL stays."""
    if is_server_url(url):
        parts = urlsplit(url)
        _, at, host = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"…@{host}")) if at else url
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, separator, _ = head.partition("://")
    return f"{scheme}://…@{tail}" if separator else tail


def is_server_url(url: str) -> bool:
    """Whether ``url`` can be that of a server: http or https, a host, maybe a port and a path."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    return (
        url.isprintable()
        and parts.scheme in ("http", "https")
        and host is not None
        and " " not in host
        and port != 0
        and not parts.query
        and not parts.fragment
    )


def basic_login(user: str | None, password: str | None) -> str:
    """The value of an Authorization header, of parts of a URL."""
    login = f"{unquote(user or '')}:{unquote(password or '')}".encode("latin-1")
    return f"Basic {base64.b64encode(login).decode()}"


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "…")
    return text


def _masked_in(
    value: Any, secrets: Sequence[str], names: frozenset[str], fields: frozenset[str]
) -> Any:
    """The JSON ``value``, masked but for these ``names`` and what is in these ``fields``."""
    match value:
        case str():
            return _masked(value, secrets)
        case list():
            return [_masked_in(item, secrets, names, fields) for item in value]
        case dict():
            return {
                name if name in names else _masked(name, secrets): (
                    item if name in fields else _masked_in(item, secrets, names, fields)
                )
                for name, item in value.items()
            }
    return value


def _is_acted_on(secret: str) -> bool:
    # Part of a word counts: to mask "stream" would make another word of "streamer".
    return any(secret in word for word in _WORDS) or _VERSION.match(secret) is not None


def _escaped(secret: str) -> Iterator[str]:
    """How ``secret`` stands in a text that quotes it as JSON does, or Python in either quotes."""
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield repr(f"{secret}'\"")[1:-4]  # with both in it, the single ones are escaped


def _in_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for value in headers.values():
        yield value
        # The token alone of "Bearer TOKEN", the values alone of "a=b; c=d".
        yield from re.split(r"[\s;,=]+", value)[1:]


def _in_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:  # of a proxy's, which is refused where it is used
        return
    user, password = parts.username or "", parts.password or ""
    yield from (user, password, unquote(user), unquote(password))
    try:
        yield basic_login(user, password).removeprefix("Basic ")
    except UnicodeError:
        raise UsageError(f"{hide_user(url)}: only Latin-1 can be sent as user:password") from None
