"""What a sync puts in place of a server's weight version while it is under way.

It is all that survives a trainer that dies: the next one sees by it that the server holds, or may
hold, a mixture of weights, or was left paused by a sync that could not resume it.
"""

from __future__ import annotations

import secrets

from streamer.exceptions import UsageError

INCOMPLETE = "streamer-incomplete:"
"""Every mark begins with this."""
_HELD = "held-by-user:"
"""Follows where the server's user had paused it: a repair must not resume it."""


def mark_of(weight_version: str, *, held: bool) -> str:
    """A fresh mark for a sync to ``weight_version``; ``held``: the server was paused by its user.

    No two are alike: a sync knows its own, also where another trainer pushes the same version.
    """
    return f"{INCOMPLETE}{_HELD if held else ''}{weight_version}#{secrets.token_hex(4)}"


def is_incomplete(version: str | None) -> bool:
    """Whether what a server calls its weights is a mark."""
    return version is not None and version.startswith(INCOMPLETE)


def is_held(version: str | None) -> bool:
    """Whether it is the mark of a server that its user had paused."""
    return version is not None and version.startswith(INCOMPLETE + _HELD)


def check_weight_version(version: object) -> None:
    """Raise `UsageError` for what cannot be a weight version; None is none, and passes."""
    if version is None:
        return
    if not isinstance(version, str):
        raise UsageError(f"a weight version is a text, not {version!r}")
    if not version:
        raise UsageError("the weight version is empty: give a name, or none, and one is made up")
    if any("\ud800" <= letter <= "\udfff" for letter in version):
        raise UsageError(f"a weight version has half a character (a surrogate): {version!r}")
    for mark in (INCOMPLETE, _HELD):
        if version.startswith(mark):
            raise UsageError(f"a weight version must not start with {mark!r}, which marks failures")
