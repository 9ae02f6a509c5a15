"""A push that fails on one rank before it has a source: the others do not wait for it in vain."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from streamer.exceptions import RankError
from streamer.follower import Follower
from streamer.leader import Leader, is_leading
from streamer.ranks import Ranks, noted, several_ranks
from streamer.source import TensorSpec, WeightSource
from streamer.timeouts import Clock, Timeouts

_PATIENCE = 5.0
"""How long ranks are waited for that may not come: nobody knows what the source would have been."""


@contextlib.contextmanager
def announced(source: object) -> Iterator[None]:
    """What the block raises is raised, too, by the ranks that push ``source`` at the same time.

    The ranks are those of the default process group. They are told if ``source`` is an object, of
    which a model may need all of them; a text names what one rank reads by itself.
    """
    try:
        yield
    except Exception as error:
        if several_ranks() and not isinstance(source, (str, os.PathLike)) and not is_leading():
            with noted(error):
                _tell(error)
        raise


def _tell(error: Exception) -> None:
    nothing = _Nothing()
    clock = Clock(Timeouts(connect=_PATIENCE))
    if nothing.ranks.sends:
        with Leader(nothing, clock) as leader:
            leader.refuse(error)
        return
    follower = Follower(nothing.ranks, clock)
    # Rank 0 may not come: it fails as well, or this source needed no others.
    with contextlib.suppress(RankError):
        follower.join()
        follower.fail(error)


class _Nothing(WeightSource):
    """What was to be opened: it has ranks, and nothing to produce."""

    def __init__(self) -> None:
        self.ranks: Ranks = Ranks.of()

    def specs(self) -> tuple[TensorSpec, ...]:
        return ()

    def __iter__(self) -> Iterator[tuple[str, object]]:  # type: ignore[override]
        return iter(())
