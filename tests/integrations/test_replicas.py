"""What every rank holds whole: what the source inside says of itself is passed on."""

from __future__ import annotations

from typing import Any

import torch

from streamer.integrations.replicas import Replicas
from streamer.ranks import Ranks


def test_the_source_inside_may_be_slow(make_source: Any) -> None:
    inner = make_source({"w": torch.ones(1)}, weight_version="commit")
    inner.progress = lambda: 17
    outer = Replicas(inner, Ranks(torch.distributed.HashStore(), 0, 2))
    assert (outer.progress(), outer.weight_version) == (17, "commit")
