"""vLLM's control plane, 0.30 and later, and that of our reference server: the order of the calls.

What a failed update does to a server, and so the order, was seen on real servers: docs/protocol.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from streamer.drivers.base import JoinInfo, ServerInfo
from streamer.drivers.checksums import ChecksumProof
from streamer.drivers.claim import Claim
from streamer.drivers.mark import is_held
from streamer.drivers.recovery import Recovery
from streamer.drivers.routes import Routes
from streamer.drivers.state import Stage, Step, SyncState, has_one_open, is_no
from streamer.drivers.vllm_info import version_numbers
from streamer.exceptions import (
    IncompatibleServer,
    PlanError,
    ServerError,
    ServerRefused,
)
from streamer.held import Held
from streamer.plan import Call, Plan
from streamer.timeouts import Clock
from streamer.verify import DIGEST, Sent

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


class VllmDriver:
    """One vLLM server. ``backend`` is asked of the server unless it is given."""

    def __init__(
        self,
        routes: Routes,
        *,
        clock: Clock,
        pause: str = "keep",
        backend: str = "auto",
        verify: bool = False,
    ) -> None:
        self.url = routes.url
        self.verified: str | None = None
        self._routes = routes
        self._clock = clock
        self._pause = pause
        self._backend = backend
        self._verify = verify
        self._proof: ChecksumProof | None = None
        self._info: ServerInfo | None = None
        self._state = SyncState()
        self._claim = Claim(routes, self._state, clock)
        self._recovery = Recovery(routes, self._state, self._claim)
        self._runs = False  # it goes on generating while it is updated
        self._last_call: Call | None = None  # which the workers have received whole

    def probe(self) -> ServerInfo:
        self._info = self._routes.ask(self._backend, self._clock.progress)
        # Workers of our own engine tell digests, which prove more.
        sums = self._verify and self._info.backend == "nccl"
        self._proof = ChecksumProof(self.url, self._checksums) if sums else None
        self._state.note(self._routes.weight_version(self._clock.progress))
        return self._info

    def _checksums(self) -> object:
        return self._routes.checksums(self._clock.progress)

    @property
    def info(self) -> ServerInfo:
        """What `probe` learned."""
        assert self._info is not None, "probe() comes first"
        return self._info

    def check(self, plan: Plan) -> None:
        why = self._routes.why_unproven(self.info) if self._proof is not None else ""
        if why:
            raise IncompatibleServer(f"{self.url} {why}")
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
        return self._claim.is_ours()

    def serves(self, weight_version: str) -> bool:
        said = self._routes.weight_version(self._clock.progress)
        return said == weight_version and not self._state.must_resume

    def join(self, info: JoinInfo) -> None:
        self._state.stuck = False
        self._last_call = None
        self._routes.init(
            {
                **info.rendezvous,
                "rank_offset": info.rank_offset,
                "world_size": info.world_size,
                "packed": info.packed,
                "packed_buffer_size_bytes": info.buffer_size,
                "packed_num_buffers": info.num_buffers,
            },
            None,  # the rendezvous beside it has the deadline
        )

    def settle(self, workers: Sequence[Mapping[str, Any]]) -> None:
        if any(worker.get("update_open") for worker in workers):
            # Where only some have it open the others refuse; the last worker alone raises, so the
            # executor stays in step.
            with contextlib.suppress(ServerRefused):
                self._routes.finish(None, self._clock.progress)

    def begin(self, weight_version: str) -> None:
        state, routes = self._state, self._routes
        self.verified = None
        state.steps, state.left_to_another = {}, False
        paused = self._claim.look()
        # Paused by its user, and not by a sync that failed: ours, or by its mark another's.
        held = paused and not state.must_resume and (not state.is_torn or is_held(state.version))
        pauses = self._pause != "none"
        self._runs = not paused and not (pauses and routes.can_pause)
        state.begin(weight_version, held=held)
        # First the mark: a trainer that dies right after has paused the server for somebody to see.
        self._take(Step.MARK, partial(routes.name_weights, state.mark))
        if pauses:
            state.must_resume = not held
            self._take(Step.PAUSE, partial(routes.pause, self._pause))
        elif paused and not held:
            state.must_resume = True  # a sync that failed has paused it, and not the caller
        if self._proof is not None:
            # The layers of a failed update may have no memory: asking would fail, out of step.
            self._proof.begin(ask=not state.is_torn)
        if state.is_torn and self.info.backend == "nccl":
            self._restore()
        self._open()

    def _take(self, step: Step, call: Callable[[float], None]) -> None:
        self._state.take(step, partial(call, self._clock.progress))

    def _open(self) -> None:
        """Open an update, also where a trainer that is gone has left one open."""
        try:
            self._take(Step.START, self._routes.start)
        except ServerRefused as error:
            if not has_one_open(error):
                raise
            if not self._state.is_torn:
                # What is open is another trainer's, and so is what becomes of it: that trainer
                # finds our mark in place of its own, unless it is through with its update.
                self._state.left_to_another, self._state.must_resume = True, False
                raise ServerError(
                    f"{self.url}: another trainer has begun to push at the same time, or somebody "
                    "has left an update open: this push gives up; push again"
                ) from error
            self._recovery.close_update(timeout=self._clock.progress)
            self._take(Step.START, self._routes.start)

    def _restore(self) -> None:
        """Put the layers of a failed update back in place, so that a new one can be opened.

        Seen on 0.32: after a failed update a plain start, update, finish fails as well, until a
        start and a finish with nothing loaded have been through. Our own engine does this itself.
        """
        refusal: ServerRefused | None = None
        try:
            self._take(Step.START, self._routes.start)
        except ServerRefused as error:
            if self.info.world_size > 1:
                raise IncompatibleServer(
                    f"{self.url} did not recover from its last failed update: restart it "
                    f"(with several workers, only the streamer backend survives one): {error}"
                ) from error
            # The last trainer died between start and update: that update is still open.
            refusal = error
        try:
            self._routes.finish(None, self._clock.progress)
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
        self._routes.update(info, None)  # the broadcast beside it has the deadline
        self._last_call = call

    def commit(self, weight_version: str, sent: Sent | None = None) -> None:
        state, routes = self._state, self._routes
        state.stage = Stage.SENT
        if not self._runs:
            # First, so that as little as can be is between the look, the finish and the resume.
            self._reset()
        self._claim.check_mark()
        self._finish(None if routes.can_name else weight_version)
        if sent is not None and self._proof is not None:
            self.verified = self._proof.prove(sent)
            self._claim.check_mark()
        elif sent is not None:
            self.verified = DIGEST
        state.stage = Stage.ARRIVED
        if self._runs:
            self._reset()
        # Last: a finish that is carried out late, when this trainer is gone, leaves the mark.
        state.naming = weight_version
        routes.name_weights(weight_version, self._clock.progress)
        state.version, state.stage = weight_version, Stage.NAMED
        if state.must_resume:
            routes.resume(self._clock.progress)
            state.must_resume = False
        state.steps = {}

    def _finish(self, weight_version: str | None) -> None:
        self._state.stage = Stage.FINISHING
        try:
            self._routes.finish(weight_version, self._clock.progress)
        except ServerError as error:
            if is_no(error):
                self._state.stage = Stage.BEGUN  # the workers have failed to load what was sent
            raise
        self._state.stage = Stage.CLOSED

    def _reset(self) -> None:
        # Requests that were kept hold keys and values of the old weights.
        self._routes.reset_prefix_cache(True, self._clock.progress)

    def release(self) -> Held | None:
        return self._recovery.release()

    def abandon(self) -> Held:
        in_step = self.info.backend != "nccl" or self.info.world_size == 1
        return self._recovery.abandon(in_step=in_step)

    def leave(self) -> None:
        self._recovery.leave()

    @property
    def verify_seconds(self) -> float:
        return 0.0 if self._proof is None else self._proof.seconds

    def cancel(self) -> None:
        self._routes.cancel()

    def close(self) -> None:
        self._routes.close()
