"""What is done to a server after a sync, or one that failed: nobody takes a mixture for weights.

docs/protocol.md says what was seen on real servers, and what cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamer.drivers.mark import is_incomplete
from streamer.drivers.routes import Routes
from streamer.exceptions import (
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
)

CLEAN_UP_SECONDS = 5.0
"""For each call. The first that is not answered is the last."""
DONE, REFUSED, UNANSWERED = "done", "refused", "unanswered"
"""What may come of a call. One that was not answered may still be carried out."""
_NONE_OPEN = "finish_weight_update called without"
"""In the refusal of a finish where no update is open, of vLLM's worker and of ours."""
_NO_VERSION = "default"
"""What vLLM calls the weights that it has started with; for a server that says nothing."""
_MAY_BE_PAUSED = "may still be paused: POST /resume to it"


@dataclass
class SyncState:
    """What is known of a server, from sync to sync, and of the sync that is under way."""

    version: str | None = None
    """What the server called its weights when this sync began, or the last one ended."""
    mark: str = ""
    """What this sync has it call them meanwhile."""
    must_resume: bool = False
    """A sync has paused it, and not its user."""
    pauses: bool = True
    """What fails is left paused."""
    began: dict[str, str] = field(default_factory=dict)
    """What was asked for before the first byte (mark, pause, start), and what came of it."""
    finishing: str | None = None
    """The finish was asked for under this version, and is maybe not answered."""
    finished: bool = False
    stuck: bool = False
    """It does not answer, or has an update open: its workers cannot be asked to leave."""

    def is_taken(self, named: str | None) -> bool:
        """Whether another trainer has pushed, or begun to, since: what is open there is its own.

        ``named`` is what the server calls its weights now.
        """
        return named is not None and named not in (self.version, self.mark, self.finishing)

    @property
    def is_torn(self) -> bool:
        """Whether the server held a mixture before this sync."""
        return is_incomplete(self.version)

    @property
    def and_paused(self) -> str:
        """As a part of a sentence."""
        return " and left paused" if self.pauses or self.must_resume else ""


class Recovery:
    """Leaves a server, after a sync of which ``state`` tells and maybe one that has failed."""

    def __init__(self, routes: Routes, state: SyncState) -> None:
        self._routes = routes
        self._state = state

    def release(self) -> str:
        """See `streamer.drivers.base.Driver`."""
        state = self._state
        steps, state.began = state.began, {}
        if not steps:
            return ""
        holds = "holds a mixture of weights" if state.is_torn else "holds the old weights"
        try:
            doubt = self._undo(steps)
        except (DeadlineExceeded, ServerUnreachable) as error:
            state.stuck = True
            return (
                f"{holds}, does not answer ({error}), and may be marked incomplete"
                f"{state.and_paused}: push again"
            )
        except StreamerError as error:
            return f"{holds}, but is marked incomplete{state.and_paused} ({error}): push again"
        if doubt == "mark":
            return f"{holds}, and may be marked incomplete yet: that call was not answered"
        if doubt is not None:
            paused = state.and_paused if doubt == "start" else ""
            return (
                f"{holds}, but is marked incomplete{paused}: its {doubt} was not answered, and may "
                "still be carried out: push again"
            )
        return ""

    def _undo(self, steps: dict[str, str]) -> str | None:
        """Take back what was begun; the step that may still come, where there is one.

        What is not known to be undone keeps the mark, or nobody would see it. Before each call the
        server is asked whether it is still ours.
        """
        state = self._state
        doubt = next((step for step, how in steps.items() if how == UNANSWERED), None)
        named = self._named()
        if self._gives_way(named):
            return None
        if doubt == "mark":
            if named != state.mark:
                return doubt
            doubt = None
        if "start" in steps:
            # Nothing was loaded: vLLM puts the old weights back exactly.
            was_open = self.close_update(may_refuse=steps["start"] == REFUSED)
            if doubt == "start":
                if not was_open:
                    return doubt  # a completion while an update is open ends vLLM: stay paused
                doubt = None
            if self._gives_way(self._named()):
                return None
        if state.must_resume and not state.is_torn:
            self._routes.resume(CLEAN_UP_SECONDS)
            state.must_resume = False
            if self._gives_way(self._named()):
                return None
        if doubt is None:
            # Last of all: without a mark nobody would see that a server was left paused.
            state.version = state.version if state.version is not None else _NO_VERSION
            self._routes.name_weights(state.version, CLEAN_UP_SECONDS)
        return doubt

    def close_update(self, *, may_refuse: bool = False) -> bool:
        """Close the update that is open; False if none is.

        ``may_refuse``: the server has said before that it opened none, so any refusal tells that.
        """
        try:
            self._routes.finish(None, CLEAN_UP_SECONDS)
        except ServerRefused as error:
            if not may_refuse and _NONE_OPEN not in str(error).lower():
                raise
            return False
        return True

    def abandon(self, *, in_step: bool) -> str:
        """See `streamer.drivers.base.Driver`. ``in_step``: the workers survive a failed update."""
        state = self._state
        if state.finished and not state.must_resume:
            return "holds the new weights"
        try:
            named = self._named()
        except (ServerError, DeadlineExceeded) as error:
            state.stuck = True
            if state.finished:
                return f"holds the new weights, but {_MAY_BE_PAUSED}"
            return f"holds a mixture of weights and does not answer ({error}): restart it"
        if self._gives_way(named):
            return "was taken over by another trainer meanwhile, or restarted, and is left alone"
        if state.finished:
            return self._mark_if_paused()
        unmarked = named is not None and named == state.version != state.mark
        state.version = state.mark
        if not state.began:
            return (
                "has closed the update, but does not hold what was sent for certain; it is marked "
                "incomplete and left paused: restart it"
            )
        try:
            # Refused by workers that have failed: it stays marked, whatever it holds.
            self.close_update(may_refuse=True)
            if self._has_finished():
                return self.abandon(in_step=in_step)
            if unmarked:
                # By a trainer that has begun at the same time, and has given up.
                self._routes.name_weights(state.mark, CLEAN_UP_SECONDS)
        except (ServerError, DeadlineExceeded) as error:
            state.stuck = True
            return f"holds a mixture of weights and does not answer ({error}): restart it"
        if self._routes.has_died(CLEAN_UP_SECONDS):
            return "holds a mixture of weights and has lost a worker (/health: 503): restart it"
        if not in_step:
            return (
                "holds a mixture of old and new weights, and its workers may be out of step: "
                "restart it (the streamer backend survives this)"
            )
        return f"holds a mixture of old and new weights, {self._left}"

    @property
    def _left(self) -> str:
        if not self._routes.can_pause:
            return "cannot be paused: push again before it generates anything"
        return f"is marked incomplete{self._state.and_paused}: push again"

    def _mark_if_paused(self) -> str:
        """What a server holds that has the new weights, and may not have been resumed.

        It is marked if it is paused: another trainer would take it for one that its user has
        paused, and leave it so.
        """
        state = self._state
        try:
            if not self._routes.is_paused(CLEAN_UP_SECONDS):
                state.must_resume = False
                return "holds the new weights, and answers with them"
            self._routes.name_weights(state.mark, CLEAN_UP_SECONDS)
        except StreamerError:
            return f"holds the new weights, but {_MAY_BE_PAUSED}"
        state.version = state.mark
        return f"holds the new weights, but {self._left}"

    def _has_finished(self) -> bool:
        """Whether a finish that was not answered has been done all the same."""
        state = self._state
        if state.finishing is not None and self._named() == state.finishing:
            state.version, state.finished = state.finishing, True
        return state.finished

    def leave(self) -> None:
        """See `streamer.drivers.base.Driver`."""
        # A server with an update open refuses, and one that does not answer would be waited for.
        if not self._state.stuck and not self._state.is_taken(self._named()):
            self._routes.shutdown(CLEAN_UP_SECONDS)

    def _gives_way(self, named: str | None) -> bool:
        """Whether another trainer has taken the server over: then resuming is its affair."""
        taken = self._state.is_taken(named)
        if taken:
            self._state.must_resume = False
        return taken

    def _named(self) -> str | None:
        return self._routes.weight_version(CLEAN_UP_SECONDS)
