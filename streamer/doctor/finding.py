"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamer.exceptions import plain


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about one thing. ``server`` is a URL, or empty if it is about this host.

    ``ok``: as it should be. ``warn``: a push goes on, and the user should know. ``fail``: a push
    would fail. ``remedy`` is what to do about the latter two.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""
    server: str = ""


def ok(name: str, text: str) -> Finding:
    """As it should be."""
    return Finding(name, "ok", plain(text))


def warn(name: str, text: str, remedy: str) -> Finding:
    """A push goes on, and the user should know."""
    return Finding(name, "warn", plain(text), remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """A push would fail."""
    return Finding(name, "fail", plain(text), remedy)
