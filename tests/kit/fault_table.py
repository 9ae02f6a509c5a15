"""The table of faults: every phase of a sync by every kind of fault, and what has to come of it.

`cells` is the whole product. A cell that cannot be, or is another one, says so: `not_a_cell`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from streamer import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    SourceError,
    StreamerError,
)

NCCL = "STREAMER_TEST_GPU" in os.environ
"""Whether the workers are on a GPU. Over Gloo otherwise."""
WORKERS = 1 if NCCL else 2
"""Of the server. The last one is the one that is killed or stopped."""
LATE_JOIN = "did not answer the join: "
THROUGH = "did not answer the update: the broadcast group was through"
STUCK = THROUGH if NCCL else "did not answer the update: a worker is stuck or gone: no byte moved"
"""Where a worker does not receive. Over NCCL, what is so small is left in the worker's memory."""
UPDATE = "/update_weights"
CALLS = 3
"""Calls of ``/update_weights`` in one sync."""


@dataclass(frozen=True)
class Phase:
    """A row. The fault strikes at call ``nth`` of ``path``: at its ``arrival``, in the ``middle``
    of what goes on beside it, or once the server has ``answered`` it."""

    name: str
    group: str
    path: str
    nth: int = 1
    where: str = "arrival"


PHASES = (
    Phase("connect: /version", "connect", "/version"),
    Phase("connect: /get_world_size", "connect", "/get_world_size"),
    Phase("connect: /server_info", "connect", "/server_info"),
    Phase("connect: /weight_info", "connect", "/weight_info"),
    Phase("init", "init", "/init_weight_transfer_engine"),
    Phase("warm-up", "init", "/init_weight_transfer_engine", where="middle"),
    Phase("begin: /is_paused", "begin", "/is_paused"),
    Phase("begin: mark", "begin", "/update_weight_version"),
    Phase("begin: /pause", "begin", "/pause"),
    Phase("begin: start", "begin", "/start_weight_update"),
    Phase("update: first byte", "update", UPDATE),
    Phase("update: middle", "update", UPDATE, 2, "middle"),
    Phase("update: last call", "update", UPDATE, CALLS),
    Phase("update: answer", "update", UPDATE, CALLS, "answered"),
    Phase("reset", "reset", "/reset_prefix_cache"),
    Phase("finish", "finish", "/finish_weight_update"),
    Phase("name", "name", "/update_weight_version", 2),
    Phase("resume", "resume", "/resume"),
)

ASKED_AT_ONCE = (
    "connect: /version",
    "connect: /get_world_size",
    "connect: /server_info",
    "begin: /is_paused",  # with /weight_info
)
"""Where a server that is gone is noticed by one of several calls, whichever comes first."""

HTTP = ("500", "404", "HTML page", "garbage", "closed", "never", "slow")
"""How the server answers. Where it is ``garbage``, ``closed`` or ``slow`` it has done what it was
asked; else it has not."""
PROCESS = ("worker killed", "worker stopped", "server killed", "server stopped")
FILE = ("file replaced", "file rewritten", "file truncated")
SOURCE = ("source raises", "read error", "out of memory")
KINDS = (*HTTP, *PROCESS, *FILE, *SOURCE)
DONE = ("garbage", "closed", "slow")
LATE = ("never", "worker stopped", "server stopped")
"""What only a deadline ends."""


@dataclass(frozen=True)
class Outcome:
    """What has to come of a cell.

    ``error`` is None where the sync has to succeed; its text has to match ``says``. Afterwards the
    server holds ``weights``: ``old``, ``new``, a ``mixture``, one ``or`` the other, or nobody can
    tell (``dead``).
    """

    error: type[StreamerError] | None = None
    says: str = ""
    weights: str = "new"
    paused: bool = False
    marked: bool = False

    def allows(self, seen: Outcome) -> bool:
        """Whether a server that was ``seen`` like this is as it has to be."""
        return seen == replace(self, weights=seen.weights) and seen.weights in self.weights.split(
            " or "
        )


@dataclass(frozen=True)
class Cell:
    """One kind of fault in one phase."""

    phase: Phase
    kind: str

    @property
    def finished(self) -> bool:
        """Whether the server may well hold the new weights, for all that the sync fails."""
        refused = self.phase.group == "finish" and self.kind in ("500", "404")
        return self.phase.group in ("reset", "finish", "name", "resume") and not refused

    def __str__(self) -> str:
        return f"{self.phase.name} x {self.kind}"


def not_a_cell(phase: Phase, kind: str) -> str:
    """Why there is no such cell, empty if there is."""
    if kind in SOURCE:
        if phase.group == "connect" or phase.name == "init":
            return "nothing is read or allocated before all have joined"
        if phase.name == "warm-up" and kind != "out of memory":
            return "nothing is read before all have joined"
        last = "update: last call" if kind != "source raises" else "update: answer"
        if [each.name for each in PHASES].index(phase.name) > [each.name for each in PHASES].index(
            last
        ):
            return "all is read and copied by then"
    if kind.startswith("worker"):
        if phase.group == "connect":
            return "as at init: these calls ask no worker"
        if phase.group in ("reset", "name", "resume"):
            return "as at finish: these calls ask no worker"
        if kind == "worker stopped" and phase.name == "warm-up":
            return "as at init: it does not come to either"
    if kind in FILE and phase.name == "warm-up":
        return "as at init: both are one call"
    return ""


def cells() -> list[Cell]:
    """Every cell of the table."""
    product = (Cell(phase, kind) for phase in PHASES for kind in KINDS)
    return [cell for cell in product if not not_a_cell(cell.phase, cell.kind)]


OLD = Outcome(weights="old")
MIXTURE = Outcome(weights="mixture", paused=True, marked=True)
_HTTP_ERRORS = {
    "500": (ServerRefused, "{path}: 500 made to fail"),
    "404": (IncompatibleServer, "has no {path} (404): "),
    "HTML page": (IncompatibleServer, "{path}: answered 200 with text/html, not a JSON object"),
    "garbage": (IncompatibleServer, "{path}: answered 200 with application/json, not a JSON"),
    "closed": (ServerUnreachable, "{path}: Remote end closed connection without response"),
    "never": (DeadlineExceeded, "{path}: no answer after "),
}


def outcome(cell: Cell) -> Outcome:
    """What has to come of ``cell``."""
    if cell.kind in HTTP:
        return _of_http(cell.phase, cell.kind)
    if cell.kind in PROCESS:
        return _of_process(cell.phase, cell.kind)
    return (
        _of_file(cell.phase, cell.kind) if cell.kind in FILE else _of_source(cell.phase, cell.kind)
    )


def _failed(phase: Phase, done: bool, answered: bool = True) -> Outcome:
    """The state that a failed call leaves, which the server has ``done`` or not.

    One that was not ``answered`` may still be carried out: the mark stays unless it was undone.
    """
    if phase.group in ("connect", "init", "begin"):
        if answered:
            return OLD
        if phase.name == "begin: /pause":
            return replace(OLD, marked=True)
        if phase.name == "begin: start" and not done:
            return replace(OLD, marked=True, paused=True)
        return OLD
    if phase.group in ("reset", "finish"):
        return replace(MIXTURE, weights="new")
    if phase.group in ("name", "resume"):
        return Outcome(marked=phase.group == "name" and not done)
    if phase.group == "update":
        weights = {
            "update: first byte": "mixture" if done else "old",
            "update: middle": "mixture",
            "update: last call": "new" if done else "mixture",
            "update: answer": "new",
        }[phase.name]
        return replace(MIXTURE, weights=weights)
    raise AssertionError(phase)


def _raises(state: Outcome, error: type[StreamerError], says: str, phase: Phase) -> Outcome:
    return replace(state, error=error, says=re.escape(says.format(path=phase.path)))


def _of_http(phase: Phase, kind: str) -> Outcome:
    if kind == "slow":
        return Outcome()
    error, says = _HTTP_ERRORS[kind]
    if kind == "never":
        says = {
            "init": f"{LATE_JOIN}of {WORKERS} workers, ranks "
            f"{list(range(1, WORKERS + 1))} have not joined ",
            "warm-up": f"{LATE_JOIN}the broadcast group was through",
            "update: first byte": STUCK,
            "update: last call": STUCK,
            "update: middle": THROUGH,
            "update: answer": THROUGH,
        }.get(phase.name, says)
    answered = kind in ("500", "404")
    return _raises(_failed(phase, kind in DONE, answered), error, says, phase)


def _of_process(phase: Phase, kind: str) -> Outcome:
    past = phase.name == "update: answer" or phase.group == "finish"
    if kind == "worker killed":
        if past:
            return Outcome(weights="dead")
        state = OLD if phase.group == "init" else MIXTURE
        says = f"worker {WORKERS - 1} has died: restart the server"
        return _raises(replace(state, weights="dead"), ServerRefused, says, phase)
    if kind == "worker stopped":
        if past:
            return Outcome()
        if phase.group == "init":
            return _raises(OLD, DeadlineExceeded, f"ranks [{WORKERS}] have not joined ", phase)
        return _raises(_stuck(MIXTURE), DeadlineExceeded, STUCK, phase)
    noticed = (
        replace(phase, path="/reset_prefix_cache") if phase.name == "update: answer" else phase
    )
    if phase.name in ASKED_AT_ONCE:
        noticed = replace(phase, path="")
    if kind == "server killed":
        return _raises(Outcome(weights="dead"), *_HTTP_ERRORS["closed"], noticed)
    says = _HTTP_ERRORS["never"][1]
    # What was sent to it while it was stopped is done once it goes on.
    state = _failed(noticed, done=True)
    if phase.group == "begin":
        # It does not answer any more, so nothing is undone.
        which = [each.name for each in PHASES if each.group == "begin"].index(phase.name)
        state = replace(OLD, marked=which >= 1, paused=which >= 2)
    if phase.group == "init":
        says = " have not joined "
    elif phase.group == "update" and not past:
        says, state = STUCK, _stuck(_failed(phase, done=False))
        if phase.name == "update: first byte":
            # What its kernel has received may still be read, or be lost with the connection.
            state = replace(state, weights="old or mixture")
    elif phase.group == "name":
        state = Outcome(paused=True)  # it could not be marked again
    return _raises(state, DeadlineExceeded, says, noticed)


def _stuck(state: Outcome) -> Outcome:
    """What a worker holds once it goes on: over NCCL it may still find what was left for it."""
    return replace(state, weights="old or mixture or new") if NCCL else state


def _of_file(phase: Phase, kind: str) -> Outcome:
    if phase.group in ("connect", "init"):
        says = {
            "file replaced": "was replaced by another file since its header was read",
            "file rewritten": "was rewritten in place since its header was read",
            "file truncated": "changed since its header was read",
        }[kind]
        return _raises(OLD, SourceError, says, phase)
    if (
        kind == "file replaced"
        or phase.name == "update: answer"
        or phase.group
        not in (
            "begin",
            "update",
        )
    ):
        return Outcome()  # what was opened is sent, whole
    says = {
        "file rewritten": "was rewritten in place while tensor t",
        "file truncated": "it was truncated while it was read",
    }[kind]
    state = OLD if phase.group == "begin" else MIXTURE
    return _raises(state, SourceError, says, phase)


def _of_source(phase: Phase, kind: str) -> Outcome:
    number = {"update: middle": 14, "update: last call": 21, "update: answer": 24}.get(
        phase.name, 0
    )
    state = OLD if phase.group == "begin" else MIXTURE
    if phase.name == "warm-up":
        return _raises(OLD, StreamerError, "of staging memory", phase)
    if kind == "source raises":
        where = f"tensor {number} ({f't{number:02}' if number < 24 else 'the end'})"
        state = replace(state, weights="new") if number == 24 else state
        return _raises(
            state, SourceError, f"source failed at {where}: RuntimeError: no such", phase
        )
    if kind == "read error":
        says = f"reading t{number // 3 * 3:02} to t{number // 3 * 3 + 2:02}: OSError: [Errno 5]"
        return _raises(state, SourceError, says, phase)
    return _raises(state, SourceError, f"tensor t{number:02} cannot be copied: ", phase)
