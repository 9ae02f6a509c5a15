"""Sources made of others hold no tensor while the next one is made: counted where it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import streamer
from streamer import TensorSpec, WeightSource
from streamer.integrations.lockstep import Lockstep
from streamer.source import checked

NAMES = ("a", "b", "c", "d")
SPECS = [TensorSpec(name, torch.float32, (2, 3)) for name in NAMES]


class Made:
    """Pairs that are made one by one. ``alive`` counts, as each is made, those that still live."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self._made: list[weakref.ref[torch.Tensor]] = []

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            yield name, self._make()

    def _make(self) -> torch.Tensor:
        self.alive.append(sum(ref() is not None for ref in self._made))
        tensor = torch.ones(2, 3)
        self._made.append(weakref.ref(tensor))
        return tensor


def mapped(made: Made) -> WeightSource:
    def halves(spec: TensorSpec) -> list[streamer.Edit]:
        half = TensorSpec(f"{spec.name}.0", spec.dtype, (1, 3))
        other = TensorSpec(f"{spec.name}.1", spec.dtype, (1, 3))
        return [(half, lambda tensor: tensor[:1]), (other, lambda tensor: tensor[1:])]

    return streamer.map_tensors(Lockstep(made.pairs, specs=SPECS), halves)


def of_vllm(made: Made) -> WeightSource:
    return streamer.open_source(SimpleNamespace(metadata=SPECS, iter_full=made.pairs))


OPENED: dict[str, Callable[[Made], WeightSource]] = {
    "lockstep": lambda made: Lockstep(made.pairs),
    "pairs": lambda made: streamer.open_source(made.pairs),
    "vllm": of_vllm,
    "cast": lambda made: streamer.cast(Lockstep(made.pairs, specs=SPECS), "float32"),
    "map_tensors": mapped,
}


@pytest.mark.parametrize("kind", OPENED)
def test_the_last_tensor_is_gone_when_the_next_one_is_made(kind: str) -> None:
    made = Made()
    source = OPENED[kind](made)
    for payload in checked(source, source.specs()):
        del payload
    assert len(made.alive) >= len(NAMES)
    assert made.alive == [0] * len(made.alive)
