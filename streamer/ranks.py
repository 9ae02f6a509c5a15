"""How the ranks of a trainer push together: what they agree on, step after step, and how it ends.

Where producing a tensor is a collective, every rank iterates the source, and rank 0 sends. The
steps are: all are here, and ask what tensors there are, which may be a collective as well; the
plan; each chunk, before it is produced; the end of the source; the report. At each step the
followers write how they are into the process group's store, and rank 0, which has waited
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
from typing import TYPE_CHECKING, Any

from streamer.exceptions import RankError, UsageError, one_line
from streamer.transport.store import values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from streamer.source import TensorSpec

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


def rank_key(rank: int) -> str:
    """Where a follower writes."""
    return f"rank{rank}"


def lead_key(push: int, step: int) -> str:
    """Where rank 0 writes at this step."""
    return f"lead{push % 2}{step % 2}"


def newest_lead(ranks: Ranks) -> Message:
    """What rank 0 says at an even step of the last push that it has begun."""
    return max(ranks.read_all([lead_key(push, 0) for push in (0, 1)]), key=number)


def number(message: Message) -> int:
    """Of which push a message is, from 1 on; 0 where nothing has been written yet."""
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
