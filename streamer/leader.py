"""A push on the rank that sends: what it says to the others, see `streamer.ranks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch.distributed import HashStore  # type: ignore[attr-defined]

from streamer.exceptions import RankError, StreamerError
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

if TYPE_CHECKING:
    from streamer.interrupts import Interrupts
    from streamer.plan import Chunk, Plan
    from streamer.report import Report
    from streamer.source import Payload, WeightSource
    from streamer.timeouts import Clock


class Leader:
    """Rank 0's side of one push. Leave the block with the error if there is one.

    Where the source has no ``ranks``, or but this one, nothing is done: see `alone`. ``check()`` is
    called in every wait, and may raise.
    """

    def __init__(
        self, source: WeightSource, clock: Clock, check: Callable[[], None] = lambda: None
    ) -> None:
        self._source = source
        self._ranks = source.ranks or Ranks(HashStore(), 0, 1)
        self._clock = clock
        self._timeouts = clock.timeouts
        self._check = check
        self._push = 0
        self._step = 0
        self._asking = False
        self._chunks: Iterator[Chunk] = iter(())
        self._tensors = 0
        self._made = 0
        self._ended = False
        self.alone = self._ranks.size == 1
        """There is nobody to lead: nothing is asked or told."""
        self._over = self.alone

    def __enter__(self) -> Leader:
        if not self._over:
            self._push = 1 + number(newest_lead(self._ranks))
            self._write({"go": {}})
            _leading.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _leading.discard(self)
        if error is not None:
            self.fail(error)

    @contextlib.contextmanager
    def holding(self, interrupts: Interrupts) -> Iterator[None]:
        """Where other ranks wait for this one in the block, no signal breaks in, and what it raises
        is told to them before a signal takes effect."""
        if self.alone:
            yield
            return
        with interrupts:
            try:
                yield
                interrupts.check()
            except BaseException as error:
                self.fail(error)
                raise

    def meet(self) -> None:
        """Wait for every rank to push, for the connect timeout; then all ask for their specs."""
        self._go({}, self._timeouts.connect)

    def begin(self, plan: Plan, weight_version: str | None = None) -> None:
        """Have every rank follow ``plan``. After `meet`. One that was given another version than
        this rank raises."""
        if self._over:
            return
        self._tensors = plan.tensors
        specs = fingerprints(plan.specs)
        agreed = {"packed": plan.packed, "size": plan.buffer_size, "specs": specs}
        agreed["version"] = weight_version
        self._go(agreed, self._timeouts.progress)
        self._chunks = iter(plan.chunks)

    def check(self) -> None:
        """Before each chunk: see that every rank is there and well, and let all produce it."""
        if not self._over:
            self._go({}, self._timeouts.progress)
            self._made += len(next(self._chunks).specs)

    def within(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """``payloads``; the source's end, too, is produced only once it is agreed on. After
        `begin`, and not `alone`."""
        for _ in range(self._tensors):
            yield next(payloads)
        if not self._over:
            self._go({}, self._timeouts.progress)
            self._ended = True
        next(payloads, None)

    def finish(self, report: Report) -> None:
        """The push is over: every rank returns ``report``."""
        if not self._over:
            self._go({"report": asdict(report)}, self._timeouts.progress)
            self._over = True

    def fail(self, error: BaseException) -> None:
        """Have every rank raise, for ``error``, at the next step. Only the first call counts.

        A rank that has not come yet to the first one finds it when it does.
        """
        if self._over:
            return
        self._over = True
        with noted(error):
            self._step += not self._asking
            failed = failure(error, self._ranks.rank)
            self._write(failed)
            if self._step == 1:
                self._step = 0
                self._write(failed)
            self._source.catch_up(None if self._ended else self._made)

    def refuse(self, error: BaseException) -> None:
        """`fail`, instead of `meet`, where nobody knows whether the others push at all.

        They are waited for, for the connect timeout, and one that comes later finds nothing.
        """
        self._over = True
        self._step = 1
        try:
            with contextlib.suppress(StreamerError):
                self._ask(self._timeouts.connect)
        finally:  # also after a Ctrl-C
            with noted(error):
                self._write(failure(error, self._ranks.rank))
                self._step = 0
                self._write({"over": True})

    def _go(self, message: Message, patience: float) -> None:
        if self._over:
            return
        self._step += 1
        self._asking = True
        self._ask(patience)
        self._asking = False
        self._write({"go": message})

    def _ask(self, patience: float) -> None:
        """Wait for every rank to come to this step. Raises `RankError` if one fails, or is late."""
        others = range(1, self._ranks.size)
        keys = [rank_key(rank) for rank in others]
        missing = list(others)
        for _ in polls(patience, self._look):
            # All of them each time: one that is there may fail while it waits for the others.
            said = dict(zip(others, self._ranks.read_all(keys), strict=True))
            here = [rank for rank, message in said.items() if self._is_here(message)]
            missing = [rank for rank in said if rank not in here]
            failed = [rank for rank in here if "failed" in said[rank]]
            gone = [rank for rank in here if number(said[rank]) > self._push]
            if not missing or (self._step > 1 and (failed or gone)):
                if failed:
                    raise told(said[failed[0]])
                if gone:
                    raise RankError(f"rank {gone[0]} has given this push up", gone[0])
                return
        raise RankError(
            f"rank {', '.join(map(str, missing))} did not come within {patience:g} s: every "
            "rank of the process group must push the same source at the same time",
            missing[0],
        )

    def _is_here(self, message: Message) -> bool:
        """Whether a rank has come to this step, or is through with this push."""
        if number(message) == self._push:
            return bool(message["step"] >= self._step)
        return number(message) > self._push

    def _look(self) -> None:
        self._clock.check()  # the whole push may have less time than this step
        self._check()

    def _write(self, message: Message) -> None:
        message = {"push": self._push, "step": self._step, **message}
        self._ranks.write(lead_key(self._push, self._step), message)


_leading: set[Leader] = set()


def is_leading() -> bool:
    """Whether this process is rank 0 of a push that is under way."""
    return bool(_leading)
