"""Engines in place of URLs: objects that have the four methods of vLLM's weight transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class EngineLike(Protocol):
    """What an object needs to be pushed to: vLLM's ``LLM`` and ``AsyncLLM``, or a client of one.

    A first parameter that is called ``request`` is given what vLLM's engines take, an object with
    the attribute (and key) ``init_info`` or ``update_info``; under any other name, the bare dict,
    as the clients of vLLM's own trainers take it. All methods may be coroutines; see `Engine.loop`.
    """

    @property
    def init_weight_transfer_engine(self) -> Callable[..., Any]:
        """Have the workers join the trainer's group; returns when they have."""

    @property
    def start_weight_update(self) -> Callable[..., Any]:
        """Open an update."""

    @property
    def update_weights(self) -> Callable[..., Any]:
        """Receive one call; returns when the workers have."""

    @property
    def finish_weight_update(self) -> Callable[..., Any]:
        """Close the update. Given ``weight_version`` if it takes a parameter of this name and there
        is no ``update_weight_version``, which is called otherwise."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An object with the four methods, or a handle of a Ray actor, and what it does not tell.

    ``name`` stands in errors and in the report. ``world_size`` counts the engine's workers; unless
    it is given, the engine is asked: ``get_world_size()``, ``world_size``, or vLLM's configuration.
    ``backend`` (``nccl``, ``streamer``) and ``device`` (``cuda``, ``cpu``; CUDA if nobody says)
    are taken from attributes of these names, or from vLLM's configuration. ``loop`` is the event
    loop that coroutine methods run on; `aconnect` and `apush` fill in the one that is running.
    """

    target: object
    name: str = ""
    world_size: int | None = None
    backend: str | None = None
    device: str | torch.device | None = None
    loop: asyncio.AbstractEventLoop | None = None


def missing_methods(target: object) -> list[str]:
    """Which of the four methods ``target`` has not."""
    return [method for method in METHODS if not callable(getattr(target, method, None))]
