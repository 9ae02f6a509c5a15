"""vLLM's control plane, 0.30 and later, and that of our reference server.

The routes need ``VLLM_SERVER_DEV_MODE=1``; bodies are strict, an unknown key is a 500. What a
failed update does to a server, and so the order of the calls here, was seen on real servers:
docs/protocol.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from streamer.drivers.base import Client, JoinInfo, ServerInfo
from streamer.drivers.checksums import ChecksumProof
from streamer.drivers.mark import is_held, is_incomplete, mark_of
from streamer.drivers.vllm_info import START_SO, ask, version_numbers
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    PlanError,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
)
from streamer.plan import Call, Plan
from streamer.timeouts import Clock
from streamer.verify import DIGEST, Sent

BACKENDS = ("auto", "nccl", "streamer")
PAUSE_MODES = ("keep", "wait", "abort", "none")
PER_TENSOR_DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
    }
)
"""What the map of vLLM's own engine knows, which broadcasts a tensor in its own dtype."""

_CLEAN_UP_SECONDS = 5.0
_FRESH = 0.1
"""Seconds for which a server counts as paused, or not, as it has said it is."""
_FINISH_FIRST = "finish_weight_update first"
"""In the refusal of a start while an update is open, of vLLM's worker and of ours."""
_NONE_OPEN = "finish_weight_update called without"
"""In the refusal of a finish where no update is open, of both."""
_MAY_BE_PAUSED = "may still be paused: POST /resume to it"
_DONE, _REFUSED, _UNANSWERED = "done", "refused", "unanswered"
"""What may come of a call. One that was not answered may still be carried out."""
_NO_VERSION = "default"
"""What vLLM calls the weights that it has started with; for a server that says nothing."""


class VllmDriver:
    """One vLLM server. ``backend`` is asked of the server unless it is given."""

    def __init__(
        self,
        client: Client,
        *,
        clock: Clock,
        pause: str = "keep",
        backend: str = "auto",
        verify: bool = False,
    ) -> None:
        self.url = client.url
        self.verified: str | None = None
        self._http = client
        self._clock = clock
        self._pause = pause
        self._backend = backend
        self._verify = verify
        self._proof: ChecksumProof | None = None
        self._info: ServerInfo | None = None
        self._version: str | None = None
        self._mark = ""
        self._paused: tuple[dict[str, Any], float] = ({}, -_FRESH)  # what was said of it, and when
        self._must_resume = False  # we have paused a server that was serving
        self._runs = False  # it goes on generating while it is updated: its caller wants that
        self._began: dict[str, str] = {}  # what `begin` has asked for, and what came of it
        self._finished = False
        self._finishing: str | None = None  # under this version: asked for, maybe not answered
        self._last_call: Call | None = None  # which the workers have received whole
        self._stuck = False  # a failed update could not be closed

    def probe(self) -> ServerInfo:
        self._info = self._ask()
        # Workers of our own engine tell digests, which prove more.
        sums = self._verify and self._info.backend == "nccl"
        self._proof = ChecksumProof(self.url, self._post) if sums else None
        self._version = self._weight_version()
        if self._version not in (self._mark, self._finishing):
            self._must_resume = False  # another trainer has been there, and resumed it
        return self._info

    def _ask(self) -> ServerInfo:
        return ask(self._get, self.url, self._backend)

    @property
    def info(self) -> ServerInfo:
        """What `probe` learned."""
        assert self._info is not None, "probe() comes first"
        return self._info

    def check(self, plan: Plan) -> None:
        if self._proof is not None and version_numbers(self.info.version) < (0, 32):
            raise IncompatibleServer(
                f"{self.url} runs vLLM {self.info.version}, whose own engine can prove no arrival "
                "before 0.32: upgrade it, use the streamer backend, or push without verify"
            )
        self._check_dtypes(plan)

    def _check_dtypes(self, plan: Plan) -> None:
        if plan.packed or self.info.backend != "nccl":
            return
        for chunk in plan.chunks:
            for spec in chunk.specs:
                if spec.dtype not in PER_TENSOR_DTYPES:
                    raise PlanError(
                        f"tensor {spec.name}: {self.url} cannot receive {spec.dtype_name} one "
                        "tensor at a time (vLLM's own engine); send packed, or use the streamer "
                        "backend"
                    )

    def is_ours(self) -> bool:
        before = self._version
        self._version, paused = self._ask_both()  # `begin` follows, and wants to know the second
        self._paused = (paused, time.monotonic())
        return before == self._version

    def serves(self, weight_version: str) -> bool:
        return self._weight_version() == weight_version and not self._must_resume

    def join(self, info: JoinInfo) -> None:
        self._stuck = False
        self._last_call = None
        self._send(
            "/init_weight_transfer_engine",
            {
                "init_info": {
                    **info.rendezvous,
                    "rank_offset": info.rank_offset,
                    "world_size": info.world_size,
                    "packed": info.packed,
                    "packed_buffer_size_bytes": info.buffer_size,
                    "packed_num_buffers": info.num_buffers,
                }
            },
            None,  # the rendezvous beside it has the deadline
        )

    def settle(self, workers: Sequence[Mapping[str, Any]]) -> None:
        if any(worker.get("update_open") for worker in workers):
            # Where only some have it open the others refuse; the last worker alone raises, so the
            # executor stays in step.
            with contextlib.suppress(ServerRefused):
                self._post("/finish_weight_update", {"weight_version": None})

    def begin(self, weight_version: str) -> None:
        self._began, self._finished, self._stuck = {}, False, False
        self._finishing = None
        self.verified = None
        paused = self._look()
        torn = is_incomplete(self._version)
        # Paused by its user, and not by a sync that failed: ours, or by its mark another's.
        held = paused and not self._must_resume and (not torn or is_held(self._version))
        self._runs = self._pause == "none" and not paused
        self._mark = mark_of(weight_version, held=held)
        # First the mark: a trainer that dies right after has paused the server for somebody to see.
        self._step("mark", "/update_weight_version", {"new_version": self._mark})
        if self._proof is not None:
            # The layers of a failed update may have no memory: asking would fail, out of step.
            self._proof.begin(ask=not torn)
        if self._pause != "none":
            self._must_resume = not held
            self._step("pause", f"/pause?mode={self._pause}")
        elif paused and not held:
            self._must_resume = True  # a sync that failed has paused it, and not the caller
        if torn and self.info.backend == "nccl":
            self._restore()
        try:
            self._step("start", "/start_weight_update")
        except ServerRefused as error:
            if _FINISH_FIRST not in str(error).lower():
                raise
            if not torn:
                # What is open is another trainer's, and so is what becomes of it: that trainer
                # finds our mark in place of its own, and gives up as well.
                self._began, self._must_resume = {}, False
                raise ServerError(
                    f"{self.url}: another trainer has begun to push at the same time: neither push "
                    "goes on, and the server is marked incomplete and left paused: push again"
                ) from error
            # Left open by a trainer that is gone.
            self._close_update()
            self._step("start", "/start_weight_update")

    def _step(self, name: str, path: str, body: dict[str, Any] | None = None) -> None:
        """One call of `begin`, which `release` undoes."""
        self._began[name] = _UNANSWERED
        try:
            self._post(path, body)
        except (ServerRefused, IncompatibleServer) as error:
            # A gateway that has given up does not tell what the server behind it does.
            if getattr(error, "status", 0) not in (502, 504):
                self._began[name] = _REFUSED
            raise
        self._began[name] = _DONE

    def _look(self) -> bool:
        """Take note of what the server holds, unless it has just been asked; whether it is paused.

        Raises `ServerError` if another trainer has begun to push since we have joined.
        """
        said, when = self._paused
        if time.monotonic() - when > _FRESH:
            info, said = self._ask_both()
            self._note(info)
        paused = said.get("is_paused") is True
        if paused and not self._must_resume and not is_incomplete(self._version):
            # Both were asked at once: who has paused it may have marked it a moment before, or is
            # about to resume it.
            info, said = self._ask_both()
            self._note(info)
            paused = said.get("is_paused") is True
        return paused

    def _ask_both(self) -> tuple[str | None, dict[str, Any]]:
        """The weight version, and what is said of a pause: at once, they take the time of one."""
        with self._routes():
            info, paused = self._http.get_all(["/weight_info", "/is_paused"], self._clock.progress)
        return _version_in(info), paused

    def _note(self, version: str | None) -> None:
        if is_incomplete(version) and version != self._version:
            raise ServerError(
                f"{self.url}: another trainer has begun to push since this one has joined: its "
                f"weights are named {self._http.hide(repr(version))}; push again when that is over"
            )
        self._version = version

    def _restore(self) -> None:
        """Put the layers of a failed update back in place, so that a new one can be opened.

        Seen on 0.32: after a failed update a plain start, update, finish fails as well, until a
        start and a finish with nothing loaded have been through. Our own engine does this itself.
        """
        refusal: ServerRefused | None = None
        try:
            self._step("start", "/start_weight_update")
        except ServerRefused as error:
            if self.info.world_size > 1:
                raise IncompatibleServer(
                    f"{self.url} did not recover from its last failed update: restart it "
                    f"(with several workers, only the streamer backend survives one): {error}"
                ) from error
            # The last trainer died between start and update: that update is still open.
            refusal = error
        try:
            self._post("/finish_weight_update", {"weight_version": None})
        except ServerRefused as error:
            raise refusal or error from None

    def update(self, call: Call, verify: int | None = None) -> None:
        ours = self.info.backend == "streamer"
        # Empty lists mean "as last time", since vLLM 0.33 and with our own engine.
        kept = ours or version_numbers(self.info.version) >= (0, 33)
        specs = [] if kept and call is self._last_call else call.wire_specs()
        self._last_call = None
        info: dict[str, Any] = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype_name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        if ours and specs:
            info["chunk_sizes"] = [chunk.nbytes for chunk in call.chunks]
        if verify is not None:
            info["verify"] = verify
        self._send("/update_weights", {"update_info": info}, None)
        self._last_call = call

    def commit(self, weight_version: str, sent: Sent | None = None) -> None:
        if not self._runs:
            # First, so that as little as can be is between the look, the finish and the resume.
            self._reset()
        self._refuse_if_taken()
        if sent is None or self._proof is None:
            self._finishing = weight_version
            self._post("/finish_weight_update", {"weight_version": weight_version})
            self.verified = None if sent is None else DIGEST
        else:
            # Without a version the mark stays.
            self._post("/finish_weight_update", {"weight_version": None})
            self._began = {}
            self.verified = self._proof.prove(sent)
            self._post("/update_weight_version", {"new_version": weight_version})
        self._version, self._finished = weight_version, True
        if self._runs:
            self._reset()
        if self._must_resume:
            self._post("/resume")
            self._must_resume = False

    def _reset(self) -> None:
        # Requests that were kept hold keys and values of the old weights: they are computed anew.
        self._post("/reset_prefix_cache?reset_running_requests=true")

    def _refuse_if_taken(self) -> None:
        """A trainer that was suspended would finish what another one has begun meanwhile."""
        said = self._weight_version()
        if said != self._mark:
            raise ServerError(
                f"{self.url}: another trainer has pushed since this sync began, or the server was "
                f"restarted: its weights are named {self._http.hide(repr(said))}, and not "
                f"{self._mark!r}; this sync is not finished there; push again"
            )

    def _named(self) -> str | None:
        """What the server calls its weights now."""
        with self._routes():
            return _version_in(self._http.get("/weight_info", _CLEAN_UP_SECONDS))

    def _is_taken(self, named: str | None) -> bool:
        """Whether another trainer has pushed, or begun to, since: what is open there is its own."""
        return named is not None and named not in (self._version, self._mark, self._finishing)

    def release(self) -> str:
        steps, self._began = self._began, {}
        if not steps:
            return ""
        torn = is_incomplete(self._version)
        holds = "holds a mixture of weights" if torn else "holds the old weights"
        try:
            doubt = self._undo(steps)
        except (DeadlineExceeded, ServerUnreachable) as error:
            self._stuck = True
            return (
                f"{holds}, does not answer ({error}), and may be marked incomplete"
                f"{self._and_paused}: push again"
            )
        except StreamerError as error:
            return f"{holds}, but is marked incomplete{self._and_paused} ({error}): push again"
        if doubt == "mark":
            return f"{holds}, and may be marked incomplete yet: that call was not answered"
        if doubt is not None:
            paused = self._and_paused if doubt == "start" else ""
            return (
                f"{holds}, but is marked incomplete{paused}: its {doubt} was not answered, and may "
                "still be carried out: push again"
            )
        return ""

    def _undo(self, steps: dict[str, str]) -> str | None:
        """Take back what `begin` has done; the step that may still come, where there is one.

        What is not known to be undone keeps the mark, or nobody would see it. The first call that
        fails is the last. Before each, the server is asked whether it is still ours.
        """
        doubt = next((step for step, how in steps.items() if how == _UNANSWERED), None)
        named = self._named()
        if self._is_taken(named):
            self._must_resume = False
            return None
        if doubt == "mark":
            if named != self._mark:
                return doubt
            doubt = None
        if "start" in steps:
            # Nothing was loaded: vLLM puts the old weights back exactly.
            was_open = self._close_update(may_refuse=steps["start"] == _REFUSED)
            if doubt == "start":
                if not was_open:
                    return doubt  # a completion while an update is open ends vLLM: stay paused
                doubt = None
            if self._is_taken(self._named()):
                self._must_resume = False
                return None
        if self._must_resume and not is_incomplete(self._version):
            self._clean_up("/resume")
            self._must_resume = False
            if self._is_taken(self._named()):
                return None
        if doubt is None:
            # Last of all: without a mark nobody would see that a server was left paused.
            old = self._version if self._version is not None else _NO_VERSION
            self._clean_up("/update_weight_version", {"new_version": old})
            self._version = old
        return doubt

    def _close_update(self, *, may_refuse: bool = False) -> bool:
        """Close the update that is open; False if none is.

        ``may_refuse``: the server has said before that it opened none, so any refusal tells that.
        """
        try:
            self._clean_up("/finish_weight_update", {"weight_version": None})
        except ServerRefused as error:
            if not may_refuse and _NONE_OPEN not in str(error).lower():
                raise
            return False
        return True

    def abandon(self) -> str:
        if self._finished and not self._must_resume:
            return "holds the new weights"
        try:
            named = self._named()
        except (ServerError, DeadlineExceeded) as error:
            self._stuck = True
            if self._finished:
                return f"holds the new weights, but {_MAY_BE_PAUSED}"
            return f"holds a mixture of weights and does not answer ({error}): restart it"
        if self._is_taken(named):
            self._must_resume = False
            return "was taken over by another trainer meanwhile, or restarted, and is left alone"
        if self._finished:
            return self._mark_if_paused()
        unmarked = named is not None and named == self._version != self._mark
        self._version = self._mark
        if not self._began:
            return (
                "has closed the update, but does not hold what was sent for certain; it is marked "
                "incomplete and left paused: restart it"
            )
        try:
            # Refused by workers that have failed: it stays marked, whatever it holds.
            self._close_update(may_refuse=True)
        except (ServerError, DeadlineExceeded) as error:
            self._stuck = True
            return f"holds a mixture of weights and does not answer ({error}): restart it"
        if self._has_finished():
            return self.abandon()
        if unmarked:
            # By a trainer that has begun at the same time, and has given up.
            self._clean_up("/update_weight_version", {"new_version": self._mark})
        if self._is_dead():
            return "holds a mixture of weights and has lost a worker (/health: 503): restart it"
        if self.info.backend == "nccl" and self.info.world_size > 1:
            return (
                "holds a mixture of old and new weights, and its workers may be out of step: "
                "restart it (the streamer backend survives this)"
            )
        return f"holds a mixture of old and new weights, {self._left}"

    def _mark_if_paused(self) -> str:
        """What a server holds that has the new weights, and may not have been resumed.

        It is marked if it is paused: another trainer would take it for one that its user has
        paused, and leave it so.
        """
        try:
            if self._http.get("/is_paused", _CLEAN_UP_SECONDS).get("is_paused") is not True:
                self._must_resume = False
                return "holds the new weights, and answers with them"
            self._clean_up("/update_weight_version", {"new_version": self._mark})
        except StreamerError:
            return f"holds the new weights, but {_MAY_BE_PAUSED}"
        self._version = self._mark
        return f"holds the new weights, but {self._left}"

    @property
    def _left(self) -> str:
        return f"is marked incomplete{self._and_paused}: push again"

    @property
    def _and_paused(self) -> str:
        return " and left paused" if self._pause != "none" or self._must_resume else ""

    def _is_dead(self) -> bool:
        """Whether the server says that its engine, or one of its workers, has died."""
        try:
            self._http.get("/health", _CLEAN_UP_SECONDS)
        except StreamerError as error:
            return isinstance(error, ServerRefused) and error.status == 503
        return False

    def _has_finished(self) -> bool:
        """Whether a finish that was not answered has been done all the same."""
        if self._finishing is None:
            return False
        with contextlib.suppress(ServerError, DeadlineExceeded):
            said = self._http.get("/weight_info", _CLEAN_UP_SECONDS).get("weight_version")
            if said == self._finishing:
                self._version, self._finished = self._finishing, True
        return self._finished

    def leave(self) -> None:
        # A server with an update open refuses, and one that does not answer would be waited for.
        if self._stuck or version_numbers(self.info.version) < (0, 32):
            return
        if not self._is_taken(self._named()):
            self._clean_up("/shutdown_weight_transfer_engine")

    @property
    def verify_seconds(self) -> float:
        return 0.0 if self._proof is None else self._proof.seconds

    def cancel(self) -> None:
        self._http.cancel()

    def close(self) -> None:
        self._http.cancel()

    def _weight_version(self) -> str | None:
        return _version_in(self._get("/weight_info"))

    def _get(self, path: str) -> dict[str, Any]:
        with self._routes():
            return self._http.get(path, self._clock.progress)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._send(path, body, self._clock.progress)

    def _clean_up(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._send(path, body, _CLEAN_UP_SECONDS)

    def _send(
        self, path: str, body: dict[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        with self._routes():
            return self._http.post(path, body, timeout)

    @contextlib.contextmanager
    def _routes(self) -> Iterator[None]:
        """A 404 means that the server was not started with this route."""
        try:
            yield
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise IncompatibleServer(f"{self.url} has no {error.path} (404): {START_SO}") from error


def _version_in(info: Mapping[str, Any]) -> str | None:
    value = info.get("weight_version")
    return None if value is None else str(value)
