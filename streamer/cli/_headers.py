"""HTTP headers from the command line. What they say is secret: no error repeats it."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.drivers.http import HEADER_NAME
from streamer.exceptions import UsageError


def make_headers(headers: Sequence[str] | None, api_key: str | None) -> dict[str, str]:
    """The headers of ``NAME: VALUE`` lines and an API key; a line for Authorization wins over that.

    Raises `UsageError` for what cannot be a header.
    """
    made: dict[str, str] = {}
    if api_key:
        made["authorization"] = f"Bearer {sendable('the API key', api_key)}"
    for line in headers or ():
        name, colon, value = line.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name):
            raise UsageError("--header: give 'NAME: VALUE', as in 'Authorization: Bearer KEY'")
        made[name.lower()] = sendable(f"--header {name}", value)
    return made


def sendable(what: str, text: str) -> str:
    """``text`` as the value of a header. Raises `UsageError`, which does not show it."""
    text = text.strip()  # a key out of a file often ends with a line break
    if not (text.isascii() and text.isprintable()):
        raise UsageError(f"{what}: only printable ASCII can be sent")
    return text
