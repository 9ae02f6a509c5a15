"""How the ranks of a trainer push together: what they agree on, step after step, and how it ends.

Where producing a tensor is a collective, every rank iterates the source, and rank 0 sends. The
steps are: the plan; each chunk, before it is produced; the end of the source; the report. At each
step the followers write how they are into the process group's store, and rank 0, which has waited
for all of them, writes what comes next: to go on, or which rank has failed. Nobody begins a
collective that another rank does not come to: who fails between two steps produces the rest of its
chunk first (`WeightSource.catch_up`), and every rank raises at the next step.

A follower has one key, and rank 0 has four, which are overwritten: the store does not grow. The
four take turns, for each step and each push, so that a rank that is slow still finds the last
answer when the next one is there.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from streamer.exceptions import RankError, UsageError, one_line
from streamer.transport.store import values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from streamer.plan import Chunk, Plan
    from streamer.report import Report
    from streamer.source import Payload, TensorSpec, WeightSource
    from streamer.timeouts import Clock

Message = dict[str, Any]


class Ranks:
    """The ranks of a process group, which all push the same source; rank 0 sends.

    Two pushes over one group must not overlap. Only the group's store is used, no collective.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, group: ProcessGroup | None = None) -> Ranks:
        """The ranks of ``group``, the default one if it is None. Raises `UsageError` outside it."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("there is no process group: call torch.distributed.init_process_group")
        rank = dist.get_rank(group)
        if rank < 0:
            raise UsageError("this process is not in the group that pushes")
        known = group or dist.distributed_c10d._get_default_group()
        store = dist.distributed_c10d._get_process_group_store(known)
        prefixed = dist.distributed_c10d.PrefixStore("streamer", store)
        return cls(prefixed, rank, dist.get_world_size(group))

    @property
    def sends(self) -> bool:
        """Whether this is the rank that sends."""
        return self.rank == 0

    def read(self, key: str) -> Message:
        """What was last written, or nothing."""
        return self.read_all([key])[0]

    def read_all(self, keys: list[str]) -> list[Message]:
        """What was last written to each of ``keys``, or nothing, in as many requests as for one."""
        with self._named_errors():
            return [json.loads(said or b"{}") for said in values(self._store, keys)]

    def write(self, key: str, message: Message) -> None:
        """Write so that every rank can read it."""
        with self._named_errors():
            self._store.set(key, json.dumps(message))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that a store raises
            raise RankError(
                f"the store of the process group does not answer ({one_line(error)}): has the "
                "process ended that hosts it, which is often rank 0?"
            ) from error


def several_ranks() -> bool:
    """Whether this process is one of several of a trainer."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Leader:
    """Rank 0's side of one push. Leave the block with the error if there is one.

    Where the source has no ``ranks``, or but this one, nothing is done: see `alone`.
    """

    def __init__(self, source: WeightSource, clock: Clock) -> None:
        self._source = source
        self._ranks = source.ranks or Ranks(HashStore(), 0, 1)
        self._clock = clock
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
            self._push = 1 + _number(newest_lead(self._ranks))
            self._write({"go": {}})
            _leading.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _leading.discard(self)
        if error is not None:
            self.fail(error)

    def begin(self, plan: Plan) -> None:
        """Wait for every rank to push, for the connect timeout, and have it follow ``plan``."""
        if self._over:
            return
        self._tensors = plan.tensors
        specs = fingerprints(plan.specs)
        agreed = {"packed": plan.packed, "size": plan.buffer_size, "specs": specs}
        self._go(agreed, self._clock.connect)
        self._chunks = iter(plan.chunks)

    def check(self) -> None:
        """Before each chunk: see that every rank is there and well, and let all produce it."""
        if not self._over:
            self._go({}, self._clock.progress)
            self._made += len(next(self._chunks).specs)

    def within(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """``payloads``; the source's end, too, is produced only once it is agreed on. After
        `begin`, and not `alone`."""
        for _ in range(self._tensors):
            yield next(payloads)
        if not self._over:
            self._go({}, self._clock.progress)
            self._ended = True
        next(payloads, None)

    def finish(self, report: Report) -> None:
        """The push is over: every rank returns ``report``."""
        if not self._over:
            self._go({"report": asdict(report)}, self._clock.progress)
            self._over = True

    def fail(self, error: BaseException) -> None:
        """Have every rank raise, for ``error``, at the next step. Only the first call counts.

        Before the first step it is waited for the others, so that none takes what this push has
        come to for the next one's end.
        """
        if self._over:
            return
        self._over = True
        with noted(error):
            if not self._asking:
                self._step += 1
                if self._step == 1:
                    with contextlib.suppress(RankError):
                        self._ask(self._clock.connect)
        with noted(error):
            self._write(failure(error, self._ranks.rank))
            if self._step == 1:
                self._step = 0
                self._write({"over": True})
            self._source.catch_up(None if self._ended else self._made)

    def _go(self, message: Message, patience: float) -> None:
        if self._over:
            return
        self._step += 1
        self._ask(patience)
        self._write({"go": message})

    def _ask(self, patience: float) -> None:
        """Wait for every rank to come to this step. Raises `RankError` if one fails, or is late."""
        self._asking = True
        others = range(1, self._ranks.size)
        keys = [rank_key(rank) for rank in others]
        missing: list[int] = []
        failed: list[Message] = []
        for _ in polls(patience, self._clock.check):
            # All of them each time: one that is there may fail while it waits for the others.
            said = dict(zip(others, self._ranks.read_all(keys), strict=True))
            here = [
                rank
                for rank, message in said.items()
                if _number(message) == self._push and message["step"] >= self._step
            ]
            missing = [rank for rank in said if rank not in here]
            failed = [said[rank] for rank in here if "failed" in said[rank]]
            if not missing or (failed and self._step > 1):
                break
        if failed:
            raise told(failed[0])
        if missing:
            self._clock.check()  # the whole push may have had less time than this step
            raise RankError(
                f"rank {', '.join(map(str, missing))} did not come within {patience:g} s: every "
                "rank of the process group must push the same source at the same time",
                missing[0],
            )
        self._asking = False

    def _write(self, message: Message) -> None:
        message = {"push": self._push, "step": self._step, **message}
        self._ranks.write(lead_key(self._push, self._step), message)


_leading: set[Leader] = set()


def is_leading() -> bool:
    """Whether this process is rank 0 of a push that is under way."""
    return bool(_leading)


def rank_key(rank: int) -> str:
    """Where a follower writes."""
    return f"rank{rank}"


def lead_key(push: int, step: int) -> str:
    """Where rank 0 writes at this step."""
    return f"lead{push % 2}{step % 2}"


def newest_lead(ranks: Ranks) -> Message:
    """What rank 0 says at an even step of the last push that it has begun."""
    return max(ranks.read_all([lead_key(push, 0) for push in (0, 1)]), key=_number)


def _number(message: Message) -> int:
    return int(message.get("push", 0))


def failure(error: BaseException, rank: int) -> Message:
    """What a rank writes that has failed, or has learned that another one has."""
    if isinstance(error, RankError):
        return {"failed": str(error), "rank": error.rank}
    text = one_line(error)
    kind = type(error).__name__
    return {"failed": f"rank {rank} failed: {kind}: {text}" if text else f"rank {rank}: {kind}"} | {
        "rank": rank
    }


def told(message: Message) -> RankError:
    """The error that another rank has written."""
    return RankError(message["failed"], message["rank"])


def fingerprints(specs: Sequence[TensorSpec]) -> str:
    """Eight digits for each spec, by which ranks see that they have the same."""
    return "".join(f"{zlib.crc32(str(spec).encode()):08x}" for spec in specs)


@contextlib.contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """What goes wrong in the block becomes a note on ``error``, which is about to be raised."""
    try:
        yield
    except Exception as problem:
        error.add_note(f"while the other ranks were told: {type(problem).__name__}: {problem}")


def polls(patience: float, check: Callable[[], None]) -> Iterator[None]:
    """Steps of a wait of at most ``patience`` seconds, each a tenth of the time so far, to 50 ms.

    The store's own wait would not end at a signal, and writes to stderr when it is over.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < patience:
        yield
        check()
        time.sleep(min(max(waited / 10, 0.0002), 0.05))
