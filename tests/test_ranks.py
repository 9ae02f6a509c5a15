"""What the ranks of a trainer write to each other, in any store, and how many requests it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from streamer import RankError, Ranks, Timeouts
from streamer.leader import Leader
from streamer.ranks import rank_key
from streamer.timeouts import Clock

STORES: dict[str, Callable[[Path], Any]] = {
    "tcp": lambda folder: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "prefix": lambda folder: PrefixStore("streamer", HashStore()),
    "file": lambda folder: FileStore(str(folder / "store"), 1),
}


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.requests = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return method(*arguments)

        return counted


@pytest.mark.parametrize("kind", STORES)
def test_what_is_written_is_read_and_what_is_not_is_nothing(tmp_path: Path, kind: str) -> None:
    ranks = Ranks(STORES[kind](tmp_path), 0, 3)
    ranks.write("one", {"step": 1})
    assert ranks.read_all(["one", "two"]) == [{"step": 1}, {}]
    ranks.write("two", {"step": 2})
    assert ranks.read_all(["two", "one"]) == [{"step": 2}, {"step": 1}]
    assert (ranks.read("two"), ranks.read("three")) == ({"step": 2}, {})


@pytest.mark.parametrize("kind", ["tcp", "prefix"])
def test_a_step_of_many_ranks_takes_as_many_requests_as_one_of_two(
    tmp_path: Path, make_source: Any, kind: str
) -> None:
    taken = {}
    for size in (2, 64):
        store = Counting(STORES[kind](tmp_path))
        source = make_source({})
        source.ranks = ranks = Ranks(store, 0, size)
        with Leader(source, Clock(Timeouts())) as leader:
            for rank in range(1, size):
                ranks.write(rank_key(rank), {"push": 1, "step": 2})
            before = store.requests
            leader._go({}, 5.0)
            taken[size] = store.requests - before
    assert taken[64] == taken[2] <= 3


def test_ranks_that_do_not_come_are_named(make_source: Any) -> None:
    source = make_source({})
    source.ranks = ranks = Ranks(HashStore(), 0, 4)
    leader = Leader(source, Clock(Timeouts()))
    ranks.write(rank_key(2), {"push": 1, "step": 1})
    with pytest.raises(RankError, match=r"^rank 1, 3 did not come within 0\.05 s: "), leader:
        leader._go({}, 0.05)
