"""Whole syncs: what they send, and what is said and called."""

from __future__ import annotations

import torch

from streamer import Timeouts

TIMEOUTS = Timeouts(connect=30, progress=20)
UPDATE = "POST /update_weights"
JOIN = "POST /init_weight_transfer_engine"
MIXTURE = "holds a mixture of old and new weights, is marked incomplete and left paused: push again"


def weights(seed, count=12, size=500):
    """Tensors whose bytes depend on ``seed``, of several dtypes."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e5m2]
    made = {}
    for i in range(count):
        dtype = dtypes[i % 4]
        data = torch.randint(
            0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        made[f"layers.{i}.weight"] = data.view(dtype)
    made["scale"] = torch.tensor(float(seed))
    made["none"] = torch.zeros(0, 4)
    return made
