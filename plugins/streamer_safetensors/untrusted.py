"""Bytes and text that nobody vouches for: what they are, and how to print them on one line."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_JSON_SIZE = 100_000_000
"""Bytes of the longest header that the safetensors format allows; an index is held to it too."""
_MAX_SHOWN = 1000

_KINDS = (
    ((b"version https://git-lfs",), "a Git LFS pointer: run `git lfs pull` in its repository"),
    (
        (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "a PyTorch pickle under another name: convert it with safetensors.torch.save_file",
    ),
    ((b"GGUF",), "a GGUF file: take the safetensors checkpoint that it was made from"),
    (
        (b"<!", b"<h", b"<H", b"<?"),
        "an HTML or XML page, perhaps of a failed download: download it again",
    ),
    ((b"{",), "JSON text, perhaps a server's answer to a failed download: download it again"),
)


def likely_kind(start: bytes) -> str | None:
    """What a file that is not what it should be probably is, and the remedy.

    Ask only about a file that was found wrong: the length of a good header may look like these.
    """
    for prefixes, kind in _KINDS:
        if start.lstrip().startswith(prefixes):
            return kind
    return None


def shown(text: object) -> str:
    """``text`` for an error message: one line, escaped if it is not printable, cut if too long."""
    line = str(text)
    if not line.isprintable():
        line = ascii(line)
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


def parse_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON. Raises `ValueError`, whose text is one line, for anything else.

    Also for what `json.loads` would take: the same key twice in an object, NaN, Infinity, -0.
    """
    try:
        return json.loads(
            raw.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_constant=_refuse,
        )
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{shown(key)} comes twice in one JSON object")
            seen.add(key)
    return result


def _integer(text: str) -> int:
    """The format has no -0 where it wants an unsigned integer; `int` would make it 0."""
    return int(text) if text != "-0" else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed in the JSON")
