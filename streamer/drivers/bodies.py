"""The JSON bodies of calls and of their answers, which may be anything at all."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any

from streamer.exceptions import UsageError

MAX_VALUES = 500_000
"""As many checksums as there is room for. Ten million empty lists would take 20 s and 2 GB."""


def read(response: http.client.HTTPResponse) -> bytes:
    """All of the answer. Raises ``IncompleteRead`` if it breaks off."""
    content = bytearray()
    while piece := response.read(1 << 16):  # room for all that is announced may not be there
        content += piece
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


def encode(what: str, body: Mapping[str, Any]) -> bytes:
    """``body`` as JSON. Raises `UsageError` for a text that is not Unicode: a server that takes it
    may never answer again."""
    content = json.dumps(body)
    if "\\ud" in content:  # a pair of surrogates, or one alone
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what}: a text in it has half a character (a surrogate)") from None
    return content.encode()


def decode(content: bytes, change: Callable[[Any], Any]) -> Any:
    """The value of a JSON text, ``change``d; None for what is no JSON, or nested too deeply, or of
    more than `MAX_VALUES`."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        return None
    try:
        return change(json.loads(content))
    except (ValueError, RecursionError):
        return None


def refusal(content: bytes, change: Callable[[Any], Any]) -> str:
    """What the body of a refusal says, its JSON ``change``d: as text it is escaped."""
    text = content.decode(errors="replace")
    if "<html" in text[:500].lower():
        return "(an HTML page)"
    value = decode(content, change)
    if value is None:
        return text
    text = str(value)
    while isinstance(value, dict):
        value = value.get("error") or value.get("message") or value.get("detail")
        text = str(value) if value else text
    return text
