"""A broadcast group inside one process, for tests: the ranks are threads."""

from __future__ import annotations

import threading
from typing import Any

import torch

from streamer.exceptions import DeadlineExceeded, TransportError
from streamer.transport.base import Transport


class LoopbackGroup:
    """``world_size`` ranks that meet in memory. ``log`` lists the bytes of every broadcast."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.log: list[int] = []
        self.barrier = threading.Barrier(world_size)
        self.sent = torch.empty(0, dtype=torch.uint8)
        self.left = False

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of one rank."""
        return LoopbackTransport(self, rank)


class LoopbackTransport(Transport):
    """One rank of a `LoopbackGroup`. A size that differs from rank 0's is an error, not a hang."""

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        super().__init__(torch.device("cpu"), rank, group.world_size)
        self._group = group

    def rendezvous(self) -> dict[str, Any]:
        return {}

    def connect(self, timeout: float) -> None:
        self._meet(timeout)

    def _broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        data = tensor.view(-1).view(torch.uint8)
        group = self._group
        if self.rank == 0:
            group.sent = data
            group.log.append(data.numel())
        self._meet(timeout)
        sent = group.sent
        if self.rank and sent.numel() == data.numel():
            data.copy_(sent)
        self._meet(timeout)
        if sent.numel() != data.numel():
            raise TransportError(
                f"rank 0 broadcasts {sent.numel()} bytes, rank {self.rank} expects {data.numel()}"
            )

    def _meet(self, timeout: float) -> None:
        self.check()
        try:
            self._group.barrier.wait(timeout)
        except threading.BrokenBarrierError:
            self.check()
            if self._group.left:
                raise TransportError("loopback: another rank has left the group") from None
            raise DeadlineExceeded(f"loopback: a rank did not come within {timeout:g} s") from None

    def _abort(self) -> None:
        self._group.left = True
        self._group.barrier.abort()

    def close(self) -> None:
        """Leave; whoever waits for this rank is woken with an error."""
        self.abort("closed")
