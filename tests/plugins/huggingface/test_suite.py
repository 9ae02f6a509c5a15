"""What every source promises, held to by both ways from the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

import streamer
from streamer import WeightSource
from streamer.testing import SourceSuite


def weights() -> dict[str, torch.Tensor]:
    """Two of a size that takes several range requests, were they not small, and odd ones."""
    generator = torch.Generator().manual_seed(4)
    return {
        "z": torch.randn(301, 33, generator=generator),
        "a": torch.randn(1001, generator=generator).bfloat16(),
        "b.steps": torch.tensor(3),
        "b.none": torch.empty(0, 2),
    }


class TestCached(SourceSuite):
    """Through `huggingface_hub` and a cache of the test's own."""

    @pytest.fixture(autouse=True)
    def _publish(
        self, hub: Any, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {"z": "model-00001-of-00002", "a": "model-00002-of-00002"}
        publish(
            {
                f"{file}.safetensors": save(
                    {name: tensor for name, tensor in weights().items() if (name == "z") == first}
                )
                for file, first in zip(files.values(), (True, False), strict=True)
            }
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        self.options: Mapping[str, Any] = {"endpoint": hub.url}

    def make_source(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source(self.target(tmp_path), **self.options)

    def expected(self) -> dict[str, torch.Tensor]:
        return weights()

    def target(self, tmp_path: Path) -> str:
        return "hf://org/name"

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source("hf://org/nothing", **self.options)


class TestDirect(TestCached):
    """By range requests."""

    @pytest.fixture(autouse=True)
    def _directly(self, _publish: None) -> None:
        self.options = {**self.options, "no_cache": True}
