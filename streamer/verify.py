"""Proof of arrival: what was sent, and what workers and servers say that they have received."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.exceptions import VerificationError
from streamer.plan import Call

DIGEST, CHANGED, NOT_PROVEN = "digest", "changed", "not proven"
"""How an arrival was proven: the values of `ServerReport.verified`."""

_REPORT_SECONDS = 5.0
"""How long a worker's report may take after its server's answer: it takes another way."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one sync has sent: equal if the same bytes went under the same names."""

    calls: tuple[Call, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group: ``number`` counts from 0 within its server."""

    url: str
    number: int
    rank: int

    def __str__(self) -> str:
        return f"{self.url}, worker {self.number} (rank {self.rank})"


def compare(
    what: str,
    sent: str,
    number: int,
    members: Sequence[Member],
    reported: Callable[[int], Mapping[str, Any]],
) -> float:
    """Hold what every worker says of the call ``number`` against the digest of what was sent.

    ``reported(rank)`` is what a worker has said last. Returns the most seconds that one of them
    has spent on its digest. Raises `VerificationError` naming ``what`` and who got something else.
    """
    deadline = time.monotonic() + _REPORT_SECONDS
    seconds = 0.0
    wrong: list[str] = []
    for member in members:
        said = reported(member.rank)
        while said.get("verify") != number and time.monotonic() < deadline:
            time.sleep(0.005)
            said = reported(member.rank)
        if said.get("verify") != number:
            wrong.append(
                f"{member} answered {what}, and told no digest of it within {_REPORT_SECONDS:g} s: "
                "install this version of streamer beside it, or push without verify"
            )
        elif said.get("digest") != sent:
            wrong.append(
                f"{member} received {said.get('digest')} for {what}, sent was {sent}: what it "
                "holds is not what was sent; look for NCCL or Gloo errors in its log, restart it "
                "and push again"
            )
        else:
            spent = said.get("seconds")
            seconds = max(seconds, spent) if type(spent) is float else seconds
    if wrong:
        more = len(wrong) - 1
        raise VerificationError(wrong[0] + (f" (and {more} more of its group)" if more else ""))
    return seconds
