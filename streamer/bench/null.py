"""A transport without peers: what is left of a push when nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from streamer.transport.base import Transport


class NullTransport(Transport):
    """A group of rank 0 alone, whose broadcasts reach nobody and take no time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, 0, 1)

    def rendezvous(self) -> dict[str, Any]:
        """Nothing: nobody joins."""
        return {}

    def connect(self, timeout: float) -> None:
        """Nobody is waited for."""

    def _broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        self.check()

    def _abort(self) -> None:
        """Nothing is ever stuck."""

    def close(self) -> None:
        """Leave. Idempotent."""
        self.abort("closed")
