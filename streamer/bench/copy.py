"""Host to device: pinned memory over the bus, as fast as it goes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from streamer.bench.measure import COPY, Row, repeated, timed
from streamer.bench.null import NullTransport
from streamer.broadcast.fill import SLOT_SIZE
from streamer.defaults import MIB

_PINNED = 256 * MIB
_ROUNDS = 8
_SECONDS = 60.0


def measure_copy(device: torch.device, repeats: int) -> Iterator[Row]:
    """Rates from pinned host memory to the CUDA ``device``, by the size of one copy."""
    torch.cuda.set_device(device)
    host = torch.empty(_PINNED, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(_PINNED, dtype=torch.uint8, device=device)
    waiter = NullTransport(device)
    for size in sorted({SLOT_SIZE, 64 * MIB}):

        def run(size: int = size) -> None:
            for _ in range(_ROUNDS):
                for start in range(0, _PINNED, size):
                    there[start : start + size].copy_(host[start : start + size], non_blocking=True)
            waiter.wait(_SECONDS)

        seconds = repeated(timed(run), repeats)
        setting = f"{size // MIB} MiB a copy"
        yield Row(COPY, setting, size, _ROUNDS * _PINNED, seconds, "cuda", "from pinned memory")
