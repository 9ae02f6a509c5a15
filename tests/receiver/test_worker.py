"""A worker of the reference server."""

from __future__ import annotations

import hashlib

import torch

from streamer.receiver.worker import Worker


class Elsewhere(torch.Tensor):
    """Comes to the host as a copy, as what is on a GPU does."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def test_checksums_are_of_bytes_that_are_still_there() -> None:
    worker = Worker(0, torch.device("cpu"), discard=False)
    tensors = {f"t{n}": torch.randint(0, 256, (1000,), dtype=torch.uint8) for n in range(20)}
    tensors["empty"] = torch.empty(0, dtype=torch.uint8)
    worker._tensors = {name: data.as_subclass(Elsewhere) for name, data in tensors.items()}
    assert worker.checksum() == {
        name: hashlib.sha256(bytes(data.tolist())).hexdigest() for name, data in tensors.items()
    }
