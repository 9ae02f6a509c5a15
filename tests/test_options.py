"""Options that cannot be right are told before a server is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamer import UsageError
from streamer.options import Options


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device 'cuda': Torch not compiled with CUDA enabled"),
        (torch.device("cuda"), "device device(type='cuda'): Torch not compiled with CUDA enabled"),
        (1.5, "device 1.5: "),
        ([], "device []: "),
        ("gpu", "device 'gpu': "),
        ("cpu", "device must be a CUDA device, which sends over NCCL, not 'cpu'"),
    ],
)
def test_a_device_that_cannot_send(
    monkeypatch: pytest.MonkeyPatch, device: Any, message: str
) -> None:
    def current() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", current)
    with pytest.raises(UsageError) as caught:
        Options.parse({"device": device})
    assert str(caught.value).startswith(message)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Options.parse({"device": "cuda"}).device == torch.device("cuda", 3)
    assert Options.parse({"device": "cuda:1"}).device == torch.device("cuda", 1)
    assert Options.parse({}).device is None
