"""A small checkpoint to show a push with, and its checksums, read back without our own reader."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LAYERS = 4
_HIDDEN = 1024
_VOCABULARY = 8192
_SHARDS = 2


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write a checkpoint of random bytes into ``folder``: two shards and an index, about 85 MB.

    Named like a transformer of four layers, in seven dtypes, with a scalar and an empty tensor.
    """
    import torch

    from streamer.bench.checkpoint import random_tensor, write_shards

    generator = torch.Generator().manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(_SHARDS)]
    for layer, name, dtype, shape in _layout():
        shards[layer * _SHARDS // _LAYERS][name] = random_tensor(dtype, shape, generator)
    write_shards(folder, shards, _SHARDS)


def _layout() -> Iterator[tuple[int, str, torch.dtype, tuple[int, ...]]]:
    """Layer, name, dtype and shape of every tensor."""
    import torch

    bf16, fp8, f32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    yield 0, "model.embed_tokens.weight", bf16, (_VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield layer, f"{prefix}.self_attn.{name}.weight", bf16, (_HIDDEN, _HIDDEN)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield layer, f"{prefix}.mlp.{name}.weight", fp8, (2 * _HIDDEN, _HIDDEN)
            yield layer, f"{prefix}.mlp.{name}.weight_scale", f32, ()
        yield layer, f"{prefix}.mlp.gate.e_score_correction_bias", f32, (7,)
        yield layer, f"{prefix}.input_layernorm.weight", torch.float16, (_HIDDEN,)
        yield layer, f"{prefix}.zero_points", torch.uint8, (37,)
        yield layer, f"{prefix}.empty", bf16, (0, _HIDDEN)
    yield _LAYERS - 1, "model.norm.num_batches_tracked", torch.int64, ()
    yield _LAYERS - 1, "lm_head.weight", f32, (_VOCABULARY // 8, _HIDDEN)
    yield _LAYERS - 1, "lm_head.code", torch.int8, (3, 3)


def read_checksums(folder: Path) -> dict[str, str]:
    """sha256 of every tensor's bytes in ``folder``, by name, as safetensors itself reads them."""
    from safetensors import safe_open

    checksums: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it cannot be iterated
                tensor = file.get_tensor(name).contiguous()
                data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
                checksums[name] = hashlib.sha256(data).hexdigest()
    return checksums
