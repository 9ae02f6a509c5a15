"""A push that fails before it has a source, on threads over one store. Real ranks: plugins/fsdp."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from kit_sources import Shards
from streamer import RankError, SourceError, Timeouts, announce
from streamer.announce import announced
from streamer.follower import follow
from streamer.leader import Leader
from streamer.ranks import Ranks, newest_lead
from streamer.timeouts import Clock


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks, the first of which is this process's in its default group."""
    store = HashStore()
    ranks = Ranks(store, 0, 2), Ranks(store, 1, 2)
    monkeypatch.setattr(announce, "several_ranks", lambda: True)
    monkeypatch.setattr(announce, "_PATIENCE", 0.2)
    monkeypatch.setattr(Ranks, "of", lambda: ranks[0])
    return ranks


def fail(source):
    with pytest.raises(SourceError) as caught, announced(source):
        raise SourceError("made to fail")
    assert getattr(caught.value, "__notes__", []) == []


@pytest.mark.parametrize("which", [0, 1])
def test_whom_nobody_waits_for(ranks, monkeypatch, which):
    """What was told is over: the next push is not taken for it."""
    monkeypatch.setattr(Ranks, "of", lambda: ranks[which])
    fail(object())
    late = Clock(Timeouts(connect=0.2))
    with pytest.raises(RankError, match=r"rank 0 did not come within 0\.2 s"):
        follow(Shards(ranks[1]), late, late.check)


def test_a_text_tells_nobody(ranks):
    fail("/no/such/file")
    assert newest_lead(ranks[0]) == {}


def test_a_push_that_is_under_way_is_left_alone(ranks):
    """It is over the same keys."""
    with Leader(Shards(ranks[0]), Clock(Timeouts())):
        before = newest_lead(ranks[0])
        fail(object())
        assert newest_lead(ranks[0]) == before
    fail(object())
    assert newest_lead(ranks[0]) != before
