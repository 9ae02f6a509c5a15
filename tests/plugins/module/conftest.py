"""Modules as trainers have them, and one way to see what a source sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import streamer
from streamer import SourceError, WeightSource
from streamer.source import checked


class Block(nn.Module):
    """A layer with a scale, a persistent buffer and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False).to(torch.bfloat16)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_parameter("absent", None)


class Model(nn.Module):
    """A transformer's skeleton, with a submodule and a parameter that are called ``module``."""

    def __init__(self, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.module = nn.Linear(width, 3)
        self.module.register_parameter("module", nn.Parameter(torch.randn(2)))
        self.lm_head = nn.Linear(width, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    """`Model`, always with the same values."""

    def make(**options: Any) -> Model:
        torch.manual_seed(0)
        return Model(**options)

    return make


@pytest.fixture(scope="session")
def sent() -> Callable[..., dict[str, torch.Tensor]]:
    """What opening ``source`` (with options) would send, copied, and held against its specs."""

    def collect(source: object, **options: Any) -> dict[str, torch.Tensor]:
        opened = source if isinstance(source, WeightSource) else None
        opened = opened or streamer.open_source(source, **options)
        specs = opened.specs()
        found = {
            spec.name: payload.clone()
            for spec, payload in zip(specs, checked(opened, specs), strict=True)
        }
        assert len(found) == len(specs)
        return found

    return collect


@pytest.fixture(scope="session")
def same() -> Callable[..., bool]:
    """Same names in the same order, same dtypes and values."""

    def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
        return list(found) == list(expected) and all(
            found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
            for name, tensor in expected.items()
        )

    return compare


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """The one line with which opening ``source`` through the source module fails."""

    def message(source: object, **options: Any) -> str:
        with pytest.raises(SourceError) as caught:
            streamer.open_source(source, scheme="module", **options)
        text = str(caught.value)
        assert text.isprintable(), text
        return text

    return message


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
