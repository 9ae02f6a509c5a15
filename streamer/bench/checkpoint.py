"""A checkpoint to measure with, for those who have none at hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from streamer.exceptions import UsageError

_LAYERS = 8
_SQUARES = {"self_attn.q_proj": (1, 1), "self_attn.k_proj": (1, 1), "self_attn.v_proj": (1, 1)}
_SQUARES |= {"self_attn.o_proj": (1, 1), "mlp.gate_proj": (3, 1), "mlp.up_proj": (3, 1)}
_SQUARES |= {"mlp.down_proj": (1, 3)}
_PER_LAYER = sum(rows * columns for rows, columns in _SQUARES.values())


def write_checkpoint(folder: Path, nbytes: int) -> None:
    """Write a transformer of eight layers, a file each, of about ``nbytes`` bytes in bfloat16.

    Random bytes: a disk that compresses would be flattered. Raises `UsageError` if ``folder`` has
    no room for them.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes * 1.1:
        raise UsageError(
            f"{folder} has {free / 1e9:.1f} GB free for a checkpoint of {nbytes / 1e9:.1f} GB: "
            "give a smaller --size, or another folder as TMPDIR"
        )
    hidden = max(4, math.isqrt(nbytes // (2 * _LAYERS * _PER_LAYER)) // 4 * 4)
    shapes = {name: (rows * hidden, columns * hidden) for name, (rows, columns) in _SQUARES.items()}
    shapes |= {"input_layernorm": (1, hidden), "post_attention_layernorm": (1, hidden)}
    layers = (
        {
            f"model.layers.{layer}.{name}.weight": random_tensor(torch.bfloat16, shape)
            for name, shape in shapes.items()
        }
        for layer in range(_LAYERS)
    )
    write_shards(folder, layers, _LAYERS)


def random_tensor(
    dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator | None = None
) -> torch.Tensor:
    """A tensor of random bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    # Eight bytes a number: the generator's cost is a number's, whatever its size.
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64)
    words.random_(-(1 << 63), (1 << 63) - 1, generator=generator)
    return words.view(torch.uint8)[:nbytes].view(dtype).view(shape)


def write_shards(folder: Path, shards: Iterable[dict[str, torch.Tensor]], total: int) -> None:
    """Write each of the ``total`` ``shards`` to a file as it comes, and then their index."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{total:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
