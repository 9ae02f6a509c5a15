"""What a rank holds at a time, whatever the size of the model."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("rows", [512, 514], ids=["even", "uneven"])
def test_at_most_two_whole_tensors_on_any_rank(trainer: Any, server: Any, rows: int) -> None:
    """Counted by the storages that live, of all that any operation makes but staging."""
    answers = trainer.values("memory", 4, url=server.url, rows=rows, kind="")
    for rank, found in enumerate(answers):
        assert found["tensors"] == 6
        assert found["alive"] == [0] * 6, "a tensor outlived the next gather"
        assert found["most"] <= 2.1, rank


def test_fsdp1_holds_one_unit(trainer: Any, server: Any) -> None:
    for found in trainer.values("memory", 4, url=server.url, rows=512, kind="fsdp1"):
        assert found["alive"] == [0] * 6
        assert found["most"] <= 2.1
