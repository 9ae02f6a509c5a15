"""Sharded models, streamed by several real ranks into a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Arrived = Callable[[dict[str, str]], bool]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training(trainer: Any, server: Any, arrived: Arrived, ranks: int, packed: bool) -> None:
    """Every rank has the sender's reports; three ranks divide none of the shapes."""
    found = trainer.values("training", ranks, url=server.url, packed=packed)
    assert all(other == found[0] for other in found)
    for step, (report, expected) in enumerate(found[0]):
        assert report["weight_version"] == f"step-{step}"
        assert report["tensors"] == len(expected)
        assert report["chunks"] == (5 if packed else 12)
    assert arrived(found[0][-1][1])
    assert server.weight_version == "step-2"


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("state_dict", 3),
        ("compiled", 2),
        ("one_unit", 3),
        ("tied_first", 3),
        ("tied_state", 4),
        ("mixed", 3),
        ("offloaded", 2),
        ("hybrid", 4),
        ("tensor_parallel", 3),
        ("two_dimensions", 4),
        ("placements", 4),
        ("fsdp1", 2),
        ("fsdp1", 3),
        ("fsdp1_flat", 3),
        ("fsdp1_tied_first", 2),
        ("transformed", 3),
        ("vllm", 3),
    ],
)
def test_values_are_those_of_the_unsharded_model(
    trainer: Any, server: Any, arrived: Arrived, kind: str, ranks: int
) -> None:
    found = trainer.values("once", ranks, url=server.url, kind=kind)
    report, expected = found[0]
    assert all(other == found[0] for other in found)
    assert report["tensors"] == len(expected)
    assert arrived(expected)
