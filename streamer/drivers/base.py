"""What a driver does: speak one server's dialect, from the first question to the last resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamer.held import Held

if TYPE_CHECKING:  # these import torch, for which the command line does not wait to ask a server
    from streamer.plan import Call, Plan
    from streamer.verify import Sent


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    ``backend`` is the engine that receives (``nccl``: vLLM's own; ``streamer``: ours), ``device``
    the type of its workers' device (``cuda``, ``cpu``). ``world_size`` counts its workers. ``gpus``
    are theirs as ``CUDA_VISIBLE_DEVICES`` calls them on its host, empty if it does not tell.
    """

    url: str
    version: str
    world_size: int
    backend: str
    device: str
    gpus: tuple[str, ...] = ()
    towards: str | None = None
    """This host's address as its workers reach it, where no connection to ``url`` can tell."""


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """What a server's workers are told so that they join: the trainer is rank 0."""

    rendezvous: Mapping[str, Any]
    rank_offset: int
    world_size: int
    packed: bool
    buffer_size: int
    num_buffers: int


class Driver(Protocol):
    """One server. Each method blocks until the server has answered, or raises a `StreamerError`.

    The session calls, in this order: ``probe``; ``join``, while it enters the rendezvous itself,
    and ``settle``; then for each sync ``check``, ``begin``, ``update`` once a call of the plan
    while it broadcasts, and ``commit``. A sync that fails calls ``release`` if no byte was sent,
    else ``abandon``. Before each sync but the first ``is_ours`` is asked; if one server's is False
    all leave, are probed and join again. ``serves`` may be asked before ``check``.
    """

    url: str
    verified: str | None
    """How the arrival of the last sync was proven: see `streamer.report.ServerReport`."""

    @property
    def verify_seconds(self) -> float:
        """What asking the server itself for a proof has cost in the last sync."""

    def probe(self) -> ServerInfo:
        """Ask what the server is; changes nothing there."""

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` or `IncompatibleServer` if this server cannot take ``plan``."""

    def is_ours(self) -> bool:
        """Whether the server still is as our last sync, or the probe, left it.

        If not, another trainer has been there, or another server is: what it holds now is taken
        note of, and the session joins anew.
        """

    def serves(self, weight_version: str) -> bool:
        """Whether the server says that it holds exactly this version, complete."""

    def join(self, info: JoinInfo) -> None:
        """Make the workers enter the rendezvous; returns when all of them have joined."""

    def settle(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Close an update that a dead trainer left open, going by what the workers said on joining.

        ``workers`` holds one mapping a worker, in rank order, empty where none was said.
        """

    def begin(self, weight_version: str) -> None:
        """Mark the server as incomplete, stop generation, and open an update."""

    def update(self, call: Call, verify: int | None = None) -> None:
        """Have the workers receive one call; returns when they have.

        With ``verify`` they are to tell the digest of what they got, under that number. It is for
        workers of our own engine.
        """

    def commit(self, weight_version: str, sent: Sent | None = None) -> None:
        """Drop stale caches, close the update, name the weights and let the server answer again.

        A server that goes on generating meanwhile drops its caches once the update is closed.
        With ``sent``, the arrival has to be proven, and `verified` says how. If the server is shown
        not to hold what was sent it stays marked and paused: `VerificationError`.
        """

    def release(self) -> Held | None:
        """Undo ``begin``: no byte was sent, and the server shall serve its old weights again.

        None if it does. Otherwise it may be marked and paused: how, and why.
        """

    def abandon(self) -> Held:
        """Close a failed update; what the server holds.

        It stays marked and paused, or is resumed if all had arrived.
        """

    def leave(self) -> None:
        """Have the workers leave the group, so that another trainer can connect."""

    def cancel(self) -> None:
        """Wake every call under way on another thread; it raises."""

    def close(self) -> None:
        """Drop connections."""
