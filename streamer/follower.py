"""A push on the ranks that do not send: the same plan, gathered and discarded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from streamer.exceptions import RankError, SpecMismatch
from streamer.plan import make_plan
from streamer.ranks import (
    Message,
    Ranks,
    failure,
    fingerprints,
    lead_key,
    newest_lead,
    noted,
    number,
    polls,
    rank_key,
    told,
)
from streamer.report import Report, Seconds, ServerReport
from streamer.source import TensorSpec, WeightSource, checked, specs_of
from streamer.timeouts import Clock

WITHDRAW_SECONDS = 5.0
"""How long a rank that gives up waits to hear whether rank 0 still believes that it is well. Rank 0
writes what it decides as soon as it has read how all are; if it comes later it reads the failure.
"""


def follow(
    source: WeightSource,
    clock: Clock,
    check: Callable[[], None],
    weight_version: str | None = None,
) -> Report:
    """Push ``source`` as a rank that does not send, and return the sender's report.

    Chunks are cut as the sender says, whatever this rank's own options are. ``check()`` is called
    in every wait and before each chunk, and may raise. Raises `RankError` if another rank fails or
    does not come, or pushes another ``weight_version``, where both have one: after failures, ranks
    that nothing keeps in step may be at different ones. What fails here is raised here, once the
    others are not kept waiting by it.
    """
    assert source.ranks is not None
    follower = Follower(source.ranks, clock, check)
    follower.join()
    made, ended = 0, False
    try:
        follower.agree()
        mine = specs_of(source)
        agreed = follower.agree()
        _compare(mine, agreed["specs"])
        if None not in (weight_version, agreed["version"]) and weight_version != agreed["version"]:
            raise RankError(
                f"rank {source.ranks.rank} pushes weight version {weight_version!r}, and rank 0 "
                f"{agreed['version']!r}: every rank must push the same step at the same time",
                source.ranks.rank,
            )
        plan = make_plan(mine, packed=agreed["packed"], buffer_size=agreed["size"])
        payloads = checked(source, mine)
        with contextlib.closing(payloads):
            for chunk in plan.chunks:
                go = follower.agree()
                if "report" in go:  # the servers have these weights already
                    return _report(go["report"])
                made += len(chunk.specs)
                for _ in chunk.specs:
                    next(payloads)
            follower.agree()
            ended = True
            next(payloads, None)
        return _report(follower.agree()["report"])
    except BaseException as error:
        try:
            with noted(error):
                source.catch_up(None if ended else made)
        finally:
            with noted(error):
                follower.fail(error)
        raise


class Follower:
    """What a rank that does not send says to rank 0, and hears from it, in one push."""

    def __init__(
        self, ranks: Ranks, clock: Clock, check: Callable[[], None] = lambda: None
    ) -> None:
        self._ranks = ranks
        self._clock = clock
        self._check = check
        self._key = rank_key(ranks.rank)
        self._push = 0
        self._step = 0
        self._asking = False
        self._over = False
        self._late: BaseException | None = None

    def join(self) -> None:
        """Wait for rank 0 to begin a push that this rank was not in yet, and raise if it has failed
        by now.

        Where this rank gives up first it says so: rank 0, if it is only late, must not take the
        next push of this rank, with the weights of a later step, for this one.
        """
        last, patience = 0, self._clock.timeouts.connect
        try:
            last = number(self._ranks.read(self._key))
            for _ in polls(patience, self._look):
                lead = newest_lead(self._ranks)
                if number(lead) > last and lead["step"] == 0 and "over" not in lead:
                    self._push = number(lead)
                    if "failed" in lead:
                        raise told(lead)
                    return
        except BaseException as error:
            with noted(error):
                self._push = max(number(newest_lead(self._ranks)), last + 1)
                self.fail(error)
            raise
        raise RankError(
            f"rank 0 did not come within {patience:g} s: every rank of the process group must push "
            "the same source at the same time",
            0,
        )

    def agree(self) -> dict[str, Any]:
        """Say that this rank is well, and wait for what rank 0 says to that.

        It has the time of three of its own steps and a connection: what it waits for meanwhile are
        servers, and the other ranks. Raises `RankError` if it says that a rank has failed.

        Where this rank gives up while it waits, rank 0 may have read already that it is well, and
        may be in the next collective: then that is returned, and the next step raises.
        """
        if self._late is not None:
            raise self._late
        timeouts = self._clock.timeouts
        patience = timeouts.connect + 3 * timeouts.progress
        self._step += 1
        self._asking = True
        try:
            self._write({})
            for _ in polls(patience, self._look):
                if (go := self._answer()) is not None:
                    return go
            raise RankError(
                f"rank 0 did not go on within {patience:g} s on rank {self._ranks.rank}", 0
            )
        except BaseException as error:
            if self._over:  # rank 0 has said so
                raise
            if (go := self._withdraw(error)) is None:
                raise
            self._late = error
            return go

    def _withdraw(self, error: BaseException) -> dict[str, Any] | None:
        """Say that this rank is not well after all: None, unless rank 0 has gone on by then."""
        with noted(error):
            self._write(failure(error, self._ranks.rank))
            for _ in polls(WITHDRAW_SECONDS, lambda: None):
                try:
                    if (go := self._answer()) is not None:
                        return go
                except RankError:
                    if not self._over:
                        raise
                    break  # it has read this, or knows of another failure
        self._over = True
        return None

    def _answer(self) -> dict[str, Any] | None:
        lead = self._ranks.read(lead_key(self._push, self._step))
        if number(lead) > self._push:
            self._over = True
            raise RankError("rank 0 has given this push up, and begun another", 0)
        if (lead.get("push"), lead.get("step")) != (self._push, self._step):
            return None
        self._asking = False
        if "failed" in lead:
            self._over = True
            raise told(lead)
        go: dict[str, Any] = lead["go"]
        return go

    def fail(self, error: BaseException) -> None:
        """Have every rank raise for ``error``, unless they know."""
        if not self._over:
            self._over = True
            self._step += not self._asking
            self._write(failure(error, self._ranks.rank))

    def _look(self) -> None:
        self._clock.check()  # the whole push may have less time than this step
        self._check()

    def _write(self, message: Message) -> None:
        self._ranks.write(self._key, {"push": self._push, "step": self._step, **message})


def _compare(specs: Sequence[TensorSpec], expected: str) -> None:
    """Raise `SpecMismatch` unless these are the sender's specs."""
    mine = fingerprints(specs)
    for index, spec in enumerate(specs):
        if mine[8 * index : 8 * index + 8] != expected[8 * index : 8 * index + 8]:
            raise SpecMismatch(
                f"tensor {index} is {spec} here, and another one on rank 0: every rank must push "
                "the same model, with the same options"
            )
    if mine != expected:
        raise SpecMismatch(
            f"there are {len(specs)} tensors here, and {len(expected) // 8} on rank 0"
        )


def _report(values: dict[str, Any]) -> Report:
    servers = tuple(ServerReport(**server) for server in values["servers"])
    return Report(**{**values, "seconds": Seconds(**values["seconds"]), "servers": servers})
