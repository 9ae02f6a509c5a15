"""What a server is left with by a sync that failed, in words and for programs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Remedy(enum.StrEnum):
    """What brings a server back to whole weights that are served."""

    NONE = "none"
    """Nothing: it serves whole weights, or is another trainer's."""
    PUSH = "push"
    """The next push that succeeds, of any session."""
    RESUME = "resume"
    """``POST /resume``: it has the new weights, and may be paused still."""
    RESTART = "restart"
    """To start it anew, and push to it then."""


_WORDS = {
    Remedy.NONE: "",
    Remedy.PUSH: "push again",
    Remedy.RESUME: "POST /resume to it",
    Remedy.RESTART: "restart it",
}


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds, and what to do. As text it goes on from the server's name.

    ``hint`` is said after the remedy.
    """

    state: str
    remedy: Remedy = Remedy.NONE
    hint: str = ""

    def __str__(self) -> str:
        words = f"{_WORDS[self.remedy]} {self.hint}".strip()
        return f"{self.state}: {words}" if words else self.state
