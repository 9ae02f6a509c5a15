"""What is known of a server, from sync to sync, and how far the sync under way has come."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from streamer.drivers.mark import is_incomplete, mark_of
from streamer.exceptions import IncompatibleServer, ServerError, ServerRefused


class Step(enum.Enum):
    """A call before the first byte, which `Recovery.release` undoes."""

    MARK = "mark"
    PAUSE = "pause"
    START = "start"


class How(enum.Enum):
    """What came of a call."""

    DONE = enum.auto()
    REFUSED = enum.auto()
    """It has not been carried out, and will not be."""
    UNANSWERED = enum.auto()
    """Or answered with nonsense. It may still be carried out."""


class Stage(enum.IntEnum):
    """How far a sync has come, in order. A finish that is refused leads back to `BEGUN`."""

    BEGUN = enum.auto()
    SENT = enum.auto()
    """Every byte was received."""
    FINISHING = enum.auto()
    """The finish was asked for."""
    CLOSED = enum.auto()
    """It was answered; the arrival is not proven yet."""
    ARRIVED = enum.auto()
    """The server has the new weights, under the mark."""
    NAMED = enum.auto()
    """And under their name."""


@dataclass
class SyncState:
    """Written by the driver as a sync goes on, and by `Recovery` as one is ended."""

    version: str | None = None
    """What the server called its weights when this sync began, or when the last one ended."""
    mark: str = ""
    """What this sync has it call them meanwhile."""
    naming: str | None = None
    """What this sync has asked it to call them in the end, maybe without an answer."""
    must_resume: bool = False
    """A sync has paused it, and not its user."""
    steps: dict[Step, How] = field(default_factory=dict)
    """Those that were taken before the first byte."""
    stage: Stage = Stage.BEGUN
    left_to_another: bool = False
    """The start was refused, because somebody has an update open."""
    stuck: bool = False
    """It does not answer, or may have an update open: its workers cannot be asked to leave."""

    def begin(self, weight_version: str, *, held: bool) -> None:
        """A sync begins; ``held``: its user has paused the server.

        `steps` and `left_to_another` are cleared by the driver before it looks, which may fail.
        """
        self.mark = mark_of(weight_version, held=held)
        self.naming = None
        self.stage = Stage.BEGUN
        self.stuck = False

    def take(self, step: Step, call: Callable[[], None]) -> None:
        """Take a step, and note what comes of it."""
        self.steps[step] = How.UNANSWERED
        try:
            call()
        except ServerError as error:
            if is_no(error):
                self.steps[step] = How.REFUSED
            raise
        self.steps[step] = How.DONE

    def note(self, version: str | None) -> None:
        """Take note of what the server calls its weights.

        Where another trainer has been there, it has resumed what we had paused: who has paused the
        server since is its user.
        """
        if version not in (self.version, self.mark, self.naming):
            self.must_resume = False
        self.version = version

    def is_taken(self, named: str | None) -> bool:
        """Whether another trainer has pushed, or begun to, since: what is open there is its own.

        ``named`` is what the server calls its weights now.
        """
        return named is not None and named not in (self.version, self.mark, self.naming)

    @property
    def is_torn(self) -> bool:
        """Whether the server held a mixture before this sync."""
        return is_incomplete(self.version)


_FROM_A_GATEWAY = {408, 499, 502, 503, 504, *range(520, 530)}
"""Statuses of one that has given up, which does not tell what the server behind it does."""


def is_no(error: BaseException) -> bool:
    """Whether a server has answered that it does not do what was asked, or has no such route."""
    refusal = error.__cause__ if isinstance(error, IncompatibleServer) else error
    return isinstance(refusal, ServerRefused) and refusal.status not in _FROM_A_GATEWAY


def has_one_open(refusal: ServerRefused) -> bool:
    """Whether a start was refused because an update is open: words of vLLM's worker, and ours."""
    return "finish_weight_update first" in str(refusal).lower()


def has_none_open(error: ServerError) -> bool:
    """Whether a finish was refused because no update is open, likewise."""
    refused = isinstance(error, ServerRefused)
    return refused and "finish_weight_update called without" in str(error).lower()
