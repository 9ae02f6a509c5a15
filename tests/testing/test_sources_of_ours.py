"""`SourceSuite` as authors use it, on sources of ours: each of its tests passes where it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import streamer
from streamer import WeightSource
from streamer.testing import SourceSuite

pytestmark = pytest.mark.timeout(60)


def weights() -> dict[str, torch.Tensor]:
    """All that a checkpoint may hold: odd sizes, an empty tensor, one of no dimension, fp8."""
    generator = torch.Generator().manual_seed(3)
    return {
        "z.weight": torch.randn(37, 5, generator=generator).bfloat16(),
        "a.weight": torch.randn(64, 33, generator=generator),
        "a.none": torch.empty(0, 4),
        "a.steps": torch.tensor(7),
        "m.scale": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        "m.mask": torch.tensor([True, False, True]),
        "b.bias": torch.randn(11, generator=generator).half(),
    }


class TestSafetensors(SourceSuite):
    """Deferred tensors out of a file."""

    def make_source(self, tmp_path: Path) -> WeightSource:
        save_file(weights(), tmp_path / "model.safetensors")
        return streamer.open_source(tmp_path, scheme="safetensors")

    def expected(self) -> dict[str, torch.Tensor]:
        return weights()

    def target(self, tmp_path: Path) -> object:
        return f"safetensors://{tmp_path}"

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source(f"safetensors://{tmp_path}/nothing")


class TestPairs(SourceSuite):
    """Borrowed tensors of one buffer, which is overwritten at each step; an object for a target."""

    def make_source(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source(self.target(tmp_path))

    def expected(self) -> dict[str, torch.Tensor]:
        return weights()

    def target(self, tmp_path: Path) -> object:
        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(1 << 14, dtype=torch.uint8)
            for name, tensor in weights().items():
                view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor)
                yield name, view
                buffer.fill_(0xFF)

        return pairs

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source({}, scheme="module")


class TestModule(SourceSuite):
    """Tensors that are there already, in odd strides."""

    def make_source(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source(self.target(tmp_path))

    def expected(self) -> dict[str, torch.Tensor]:
        return {"turned": weights()["a.weight"].t(), "conj": torch.tensor([1 + 2j]).conj()}

    def target(self, tmp_path: Path) -> object:
        return self.expected()

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return streamer.open_source(torch.nn.Module())
