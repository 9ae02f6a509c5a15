"""One worker's end of the group: joins, receives, and survives a trainer that dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pybase64
import torch

from streamer.digest import StreamDigest
from streamer.exceptions import PlanError, TransportError
from streamer.receiver.loop import Layout, Sink, parse_update, receive
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport
from streamer.transport.nccl import NcclTransport
from streamer.transport.worker_lifeline import WorkerLifeline

JOIN_SECONDS = 60.0
"""How long to join may take where the trainer does not say."""
_LONGEST_SECONDS = 24 * 3600.0
"""What is left of a time that the trainer says: torch counts milliseconds in 32 bits."""
RECEIVE_SECONDS = 3600.0
"""The longest wait for one broadcast. The trainer's own deadlines end a sync long before; a trainer
that is gone is noticed through the lifeline."""

_KINDS: Mapping[str, type | range] = {
    "join_seconds": float,
    "rank_offset": range(1 << 31),
    "world_size": range(1, 1 << 31),
    "nccl_unique_id_b64": str,
    "master_address": str,
    "master_port": range(1, 1 << 16),
    "packed": bool,
    "packed_buffer_size_bytes": range(1, 1 << 63),
    "packed_num_buffers": range(1, 1 << 31),
}
"""The fields of `InitInfo`: of what type, or a whole number in which range."""


@dataclass(kw_only=True)
class InitInfo:
    """``init_info`` of the streamer backend: a superset of what vLLM's nccl engine takes.

    ``master_address`` and ``master_port`` lead to the trainer's lifeline. With
    ``nccl_unique_id_b64`` the bytes come over NCCL, without it over Gloo. With the id alone there
    is no lifeline: a trainer that only speaks to vLLM's own engine can be received from as well.
    ``join_seconds`` is how long to wait for all ranks to join: a little longer than the trainer.
    """

    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    join_seconds: float = JOIN_SECONDS

    @classmethod
    def parse(cls, init_info: Mapping[str, Any]) -> InitInfo:
        """From JSON. Raises `PlanError` for a key or a value that cannot be right."""
        try:
            return cls(**init_info)
        except TypeError as error:
            raise PlanError(f"init_info: {str(error).partition(') ')[2] or error}") from None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is None and getattr(InitInfo, name, 0) is None:  # the default
                continue
            if isinstance(kind, range):
                right = type(value) is int and value in kind
                what = f"a whole number from {kind[0]} to {kind[-1]}"
            elif kind is float:
                right, what = type(value) in (int, float) and value > 0, "a number of seconds"
            else:
                right, what = type(value) is kind, f"a {kind.__name__}"
            if not right:
                raise PlanError(f"init_info: {name} must be {what}, not {value!r:.100}")
        if (self.master_address is None) != (self.master_port is None):
            raise PlanError("init_info: master_address and master_port come together")
        if self.master_address is None and self.nccl_unique_id_b64 is None:
            raise PlanError("init_info: neither nccl_unique_id_b64 nor master_address is given")


class Endpoint:
    """A worker's membership in one trainer's group. ``worker`` counts from 0 within the server."""

    def __init__(self, device: torch.device, worker: int) -> None:
        self._device = device
        self._worker = worker
        self._info: InitInfo | None = None
        self._transport: Transport | None = None
        self._lifeline: WorkerLifeline | None = None
        self._last: Layout | None = None

    def is_syncing(self) -> bool:
        """Whether the trainer of this group is alive and in the middle of a sync.

        Asks it, which takes two seconds, or three if it does not answer.
        """
        whole = self._transport is not None and not self._transport.aborted
        return whole and self._lifeline is not None and self._lifeline.is_syncing()

    def join(self, info: InitInfo, *, update_open: bool) -> None:
        """Leave any earlier group and enter this one; returns when all ranks have joined.

        ``update_open`` tells the trainer that an update of an earlier one was never finished here.
        Raises `TransportError` if the trainer cannot be reached, `DeadlineExceeded` if the ranks do
        not come.
        """
        self.leave()
        rank = info.rank_offset + self._worker
        self._info = info
        seconds = min(info.join_seconds, _LONGEST_SECONDS)
        deadline = time.monotonic() + seconds
        try:
            if info.master_address is not None and info.master_port is not None:
                self._lifeline = WorkerLifeline.join(info.master_address, info.master_port, seconds)
                self._lifeline.report(rank, update_open=update_open)
            self._transport = self._make_transport(info, rank)
            if self._lifeline is not None:
                self._lifeline.watch(rank, self._transport.abort)
            self._transport.connect(max(deadline - time.monotonic(), 0.001))
        except BaseException:
            self.leave()
            raise

    def _make_transport(self, info: InitInfo, rank: int) -> Transport:
        if info.nccl_unique_id_b64 is not None:
            try:
                unique_id = pybase64.b64decode(info.nccl_unique_id_b64, validate=True)
            except ValueError as error:
                raise TransportError(
                    f"nccl_unique_id_b64 is not standard base64: {error}"
                ) from error
            return NcclTransport(self._device, rank, info.world_size, unique_id)
        assert self._lifeline is not None
        return GlooTransport(self._lifeline, rank, info.world_size)

    def receive(
        self,
        update_info: Mapping[str, Any],
        allocate: Callable[[int], torch.Tensor],
        sink: Sink,
    ) -> None:
        """Receive one ``/update_weights`` call. See `streamer.receiver.loop.receive`.

        Empty lists mean those of the last call that was received whole, as with vLLM's own engine.
        If the trainer asks with ``verify``, a number of its own, it is told under that number the
        digest of what was received.
        """
        if self._transport is None or self._info is None:
            raise TransportError(
                "not connected to a trainer: POST /init_weight_transfer_engine first"
            )
        number = update_info.get("verify")
        if number is None:
            self._receive(self._transport, self._info, update_info, allocate, sink)
            return
        if self._lifeline is None:
            raise PlanError("update_info: verify needs the master_address of init_info")
        digest = self._transport.digest = StreamDigest(self._device)
        try:
            self._receive(self._transport, self._info, update_info, allocate, sink)
        finally:
            self._transport.digest = None
        told = {"verify": number, "digest": digest.hexdigest(), "seconds": digest.seconds}
        self._lifeline.report(self._transport.rank, **told)

    def _receive(
        self,
        transport: Transport,
        info: InitInfo,
        update_info: Mapping[str, Any],
        allocate: Callable[[int], torch.Tensor],
        sink: Sink,
    ) -> None:
        specs = parse_update(update_info)
        layout, self._last = self._last, None
        if specs or layout is None:
            layout = Layout.of(
                specs,
                packed=info.packed,
                buffer_size=info.packed_buffer_size_bytes,
                chunk_sizes=update_info.get("chunk_sizes"),
            )
        receive(transport, layout, allocate=allocate, sink=sink, timeout=RECEIVE_SECONDS)
        self._last = layout

    def abort(self, reason: str) -> None:
        """End a receive that is under way on another thread."""
        if self._transport is not None:
            self._transport.abort(reason)

    def leave(self) -> None:
        """Free the communicator and forget the trainer. Idempotent; never blocks for long."""
        self._last = None
        transport, self._transport = self._transport, None
        lifeline, self._lifeline = self._lifeline, None
        if transport is not None:
            transport.close()
        if lifeline is not None:
            if self._info is not None:
                # Another trainer may have come, which this one could not know.
                with contextlib.suppress(TransportError):
                    lifeline.report(self._info.rank_offset + self._worker, left=True)
            lifeline.close()
