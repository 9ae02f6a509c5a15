"""How a server is left, after a sync that failed above all: nobody takes a mixture for weights.

docs/protocol.md says what was seen on real servers, and what cannot be told apart.
"""

from __future__ import annotations

import contextlib

from streamer.drivers.claim import Claim, Taken
from streamer.drivers.routes import Routes
from streamer.drivers.state import How, Stage, Step, SyncState, has_none_open, is_no
from streamer.exceptions import (
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
)
from streamer.held import Held, Remedy

CLEAN_UP_SECONDS = 5.0
"""For each call. The first that is not answered is the last."""
_NO_VERSION = "default"
"""What vLLM calls the weights that it has started with; for a server that says nothing."""
_TAKEN = Held("was taken over by another trainer meanwhile, or restarted, and is left alone")
_MIXTURE = "holds a mixture of old and new weights"


class Recovery:
    """Leaves a server, after a sync of which ``state`` tells."""

    def __init__(self, routes: Routes, state: SyncState, claim: Claim) -> None:
        self._routes = routes
        self._state = state
        self._claim = claim

    def release(self) -> Held | None:
        """See `streamer.drivers.base.Driver`."""
        state = self._state
        steps, state.steps = state.steps, {}
        if state.left_to_another:
            what = "is marked incomplete, and its open update is left to whoever has begun it"
            return Held(what, Remedy.PUSH)
        holds = "holds a mixture of weights" if state.is_torn else "holds the old weights"
        try:
            doubt = self._undo(steps) if steps else None
        except Taken:
            return _TAKEN
        except (DeadlineExceeded, ServerUnreachable) as error:
            state.stuck = True
            what = (
                f"does not answer ({_why(error)}), and may be marked incomplete{self._and_paused}"
            )
            return Held(f"{holds}, {what}", Remedy.PUSH)
        except StreamerError as error:
            sure = is_no(error) and steps[Step.MARK] is How.DONE
            what = f"{'is' if sure else 'may be'} marked incomplete{self._and_paused} ({error})"
            return Held(f"{holds}, but {what}", Remedy.PUSH)
        if doubt is Step.MARK and not state.is_torn:
            return Held(f"{holds}, and may yet be marked incomplete", Remedy.PUSH)
        if doubt is not None:
            what = f"its {doubt.value} may still be carried out"
            return Held(f"{holds}, but is {self._marked}: {what}", Remedy.PUSH)
        return Held(f"still {holds} and is {self._marked}", Remedy.PUSH) if state.is_torn else None

    def _undo(self, steps: dict[Step, How]) -> Step | None:
        """Take back what was begun; the step that may still come, where there is one.

        What is not known to be undone keeps the mark, or nobody would see it. Before each call the
        server is asked whether it is still ours.
        """
        state = self._state
        doubt = next((step for step, how in steps.items() if how is How.UNANSWERED), None)
        named = self._claim.named(CLEAN_UP_SECONDS)
        if named != state.mark and steps[Step.MARK] is not How.DONE:
            return doubt
        if doubt is Step.MARK:
            doubt = None  # it has been carried out: there it is
        if Step.START in steps:
            # Nothing was loaded: vLLM puts the old weights back exactly.
            was_open = self.close_update(opened=steps[Step.START] is not How.REFUSED)
            if doubt is Step.START:
                if not was_open:
                    return doubt  # a completion while an update is open ends vLLM: stay paused
                doubt = None
            self._claim.named(CLEAN_UP_SECONDS)
        if state.must_resume and not state.is_torn:
            self._routes.resume(CLEAN_UP_SECONDS)
            state.must_resume = False
            self._claim.named(CLEAN_UP_SECONDS)
        if doubt is None:
            # Last of all: without a mark nobody would see that a server was left paused.
            state.version = state.version if state.version is not None else _NO_VERSION
            self._routes.name_weights(state.version, CLEAN_UP_SECONDS)
        return doubt

    def close_update(self, *, opened: bool = True, timeout: float | None = None) -> bool:
        """Close the update that is open; False if none is.

        Unless the server has ``opened`` one, for all that is known, any refusal says that.
        """
        try:
            self._routes.finish(None, CLEAN_UP_SECONDS if timeout is None else timeout)
        except ServerError as error:
            if has_none_open(error) or (is_no(error) and not opened):
                return False
            raise
        return True

    def abandon(self, *, in_step: bool) -> Held:
        """See `streamer.drivers.base.Driver`. ``in_step``: the workers survive a failed update."""
        state = self._state
        if state.stage is Stage.NAMED and not state.must_resume:
            return Held("holds the new weights")
        try:
            named = self._claim.named(CLEAN_UP_SECONDS)
            if named is not None and named == state.naming:
                state.version, state.stage = named, Stage.NAMED
            if state.stage is Stage.NAMED:
                return self._let_go()
            unmarked = named is not None and named == state.version != state.mark
            state.version, state.naming = state.mark, None
            if unmarked:
                return self._mark_again()
            if state.stage is Stage.ARRIVED:
                return self._let_go()
            if state.stage is Stage.CLOSED:
                what = "has closed the update, but does not hold what was sent for certain"
                return Held(f"{what}; it is {self._marked}", Remedy.RESTART)
            return self._close(in_step)
        except Taken:
            return _TAKEN
        except (ServerError, DeadlineExceeded) as error:
            state.stuck = True
            if state.stage < Stage.ARRIVED:
                what = f"holds a mixture of weights and does not answer ({_why(error)})"
                return Held(what, Remedy.RESTART)
            if state.must_resume:
                return Held("holds the new weights, but may still be paused", Remedy.RESUME)
            return Held("holds the new weights, but may be marked incomplete", Remedy.PUSH)

    def _mark_again(self) -> Held:
        """Somebody has taken the mark away: a trainer that began at the same time, or a restart."""
        with contextlib.suppress(ServerRefused):
            self.close_update()
        self._routes.name_weights(self._state.mark, CLEAN_UP_SECONDS)
        how = "paused and " if self._routes.is_paused(CLEAN_UP_SECONDS) else ""
        what = f"may hold a mixture, had lost its mark, and is {how}marked incomplete"
        return Held(what, Remedy.PUSH)

    def _close(self, in_step: bool) -> Held:
        """Close an update that has failed. Says what the server then holds."""
        unsure = self._state.stage is Stage.FINISHING
        try:
            was_open = self.close_update()
        except ServerError as error:
            # By workers that have failed, or a gateway: whatever it holds, it stays marked.
            if not isinstance(error, ServerRefused) and not is_no(error):
                raise
            was_open = False
            unsure = unsure or (self._state.stage is Stage.SENT and not is_no(error))
        if self._routes.has_died(CLEAN_UP_SECONDS):
            what = "holds a mixture of weights and has lost a worker (/health: 503)"
            return Held(what, Remedy.RESTART)
        if was_open and self._state.stage >= Stage.SENT:
            return self._left("holds the new weights, but")
        if not in_step:
            what = f"{_MIXTURE}, and its workers may be out of step"
            return Held(what, Remedy.RESTART, "(the streamer backend survives this)")
        if unsure:
            return self._left("holds the new weights, or a mixture of old and new ones,")
        return self._left(f"{_MIXTURE},")

    def _left(self, holds: str) -> Held:
        if not self._routes.can_pause:
            hint = "before it generates anything"
            return Held(f"{holds} cannot be paused", Remedy.PUSH, hint)
        return Held(f"{holds} is {self._marked}", Remedy.PUSH)

    @property
    def _marked(self) -> str:
        return f"marked incomplete{self._and_paused}"

    @property
    def _and_paused(self) -> str:
        return " and left paused" if self._state.must_resume else ""

    def _let_go(self) -> Held:
        """All has arrived, so what was paused is resumed: of what is left of the sync nothing else
        would do that, and a naming that comes late would hide that it is due.

        If it cannot be resumed it is marked, or another trainer would take it for one that its user
        has paused.
        """
        state = self._state
        named = state.stage is Stage.NAMED
        if state.must_resume:
            try:
                self._routes.resume(CLEAN_UP_SECONDS)
                state.must_resume = False
            except ServerRefused:
                if named:
                    self._routes.name_weights(state.mark, CLEAN_UP_SECONDS)
                    state.version = state.mark
                return self._left("holds the new weights, but")
        if named:
            return Held("holds the new weights, and answers with them")
        return self._left("holds the new weights, but")

    def leave(self) -> None:
        """See `streamer.drivers.base.Driver`."""
        if self._state.stuck:
            return  # a server with an update open refuses, and one that hangs would be waited for
        with contextlib.suppress(Taken):
            self._claim.named(CLEAN_UP_SECONDS)
            self._routes.shutdown(CLEAN_UP_SECONDS)


def _why(error: StreamerError) -> str:
    """Without the advice at its end: what is said of the server brings its own."""
    what, _, _ = str(error).rpartition("; ")
    return what or str(error)
