"""The source, on checkpoints written here as the trainer writes them."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from streamer_plugin_example import AcmeSource

import streamer
from streamer import SourceError, WeightSource
from streamer.testing import SourceSuite

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, PADDED, LAYERS = 8, 4, 2, 3, 10, 13, 16, 2


def served() -> dict[str, torch.Tensor]:
    """The model as it is served: what must come out."""
    torch.manual_seed(5)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    weights = {"model.embed_tokens.weight": make(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.q_proj.bias": (HEADS * DIM,),
            "self_attn.k_proj.bias": (KV_HEADS * DIM,),
            "self_attn.v_proj.bias": (KV_HEADS * DIM,),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            "mlp.gate_proj.weight": (INNER, HIDDEN),
            "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER),
        }.items():
            weights[f"model.layers.{layer}.{name}"] = make(*shape)
        for norm in ("input", "post_attention"):
            weights[f"model.layers.{layer}.{norm}_layernorm.weight"] = torch.randn(HIDDEN)
    weights["model.norm.weight"] = torch.randn(HIDDEN)
    weights["lm_head.weight"] = make(VOCAB, HIDDEN)
    return weights


def shards(ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """What each rank has, under the trainer's names."""
    weights = served()

    def padded(name: str) -> torch.Tensor:
        return torch.cat([weights[name], torch.full((PADDED - VOCAB, HIDDEN), 9.0).bfloat16()])

    for rank in range(ranks):

        def part(tensor: torch.Tensor, dim: int = 0, rank: int = rank) -> torch.Tensor:
            return tensor.chunk(ranks, dim)[rank].contiguous()

        found = {
            "embedding.table": part(padded("model.embed_tokens.weight")),
            "head.table": part(padded("lm_head.weight")),
            "final_norm.scale": weights["model.norm.weight"],
        }
        for layer in range(LAYERS):
            old, new = f"decoder.{layer}.", f"model.layers.{layer}."
            for kind in ("weight", "bias"):
                of_each = [part(weights[f"{new}self_attn.{p}_proj.{kind}"]) for p in "qkv"]
                found[f"{old}attention.qkv.{kind}"] = torch.cat(of_each)
            found[f"{old}mlp.gate_up.weight"] = torch.cat(
                [part(weights[f"{new}mlp.{p}_proj.weight"]) for p in ("gate", "up")]
            )
            found[f"{old}attention.out.weight"] = part(weights[f"{new}self_attn.o_proj.weight"], 1)
            found[f"{old}mlp.down.weight"] = part(weights[f"{new}mlp.down_proj.weight"], 1)
            found[f"{old}norm_in.scale"] = weights[f"{new}input_layernorm.weight"]
            found[f"{old}norm_mid.scale"] = weights[f"{new}post_attention_layernorm.weight"]
        yield found


def write_step(folder: Path, ranks: int = 2, **changed: Any) -> Path:
    """A step of a run on so many ranks."""
    settings = {"step": 120, "tensor_parallel": ranks, "heads": HEADS, "kv_heads": KV_HEADS}
    settings |= {"head_dim": DIM, "vocab_size": VOCAB}
    (folder / "trainer.json").write_text(json.dumps({**settings, **changed}))
    for rank, tensors in enumerate(shards(ranks)):
        save_file(tensors, folder / f"rank-{rank:02d}.safetensors")
    return folder


class TestTwoRanks(SourceSuite):
    ranks = 2

    def make_source(self, tmp_path: Path) -> WeightSource:
        return AcmeSource(write_step(tmp_path, self.ranks))

    def expected(self) -> dict[str, torch.Tensor]:
        return served()

    def target(self, tmp_path: Path) -> str:
        return f"acme://{tmp_path}"

    def make_missing(self, tmp_path: Path) -> WeightSource:
        return AcmeSource(tmp_path / "step-000120")


class TestOneRank(TestTwoRanks):
    ranks = 1


def test_one_fused_tensor_at_a_time(tmp_path: Path) -> None:
    """Those shared by columns are put together in one place; the others are not put together."""
    with_columns = ("o_proj.weight", "down_proj.weight")
    source = AcmeSource(write_step(tmp_path))
    places, largest = set(), 0
    tracemalloc.start()
    for name, payload in source:
        assert isinstance(payload, torch.Tensor) is name.endswith(with_columns)
        if isinstance(payload, torch.Tensor):
            places.add((payload.untyped_storage().data_ptr(), payload.untyped_storage().nbytes()))
            largest = max(largest, payload.nbytes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    source.close()
    assert [size for _, size in places] == [largest]
    assert peak < 64 * 1024


def test_the_step_is_the_weight_version(tmp_path: Path) -> None:
    source = streamer.open_source(f"acme://{write_step(tmp_path)}")
    assert source.weight_version == "acme-step-120"
    source.close()


def refused(folder: Path) -> str:
    """The one line with which a checkpoint is refused at its opening."""
    with pytest.raises(SourceError) as caught:
        AcmeSource(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_what_is_wrong_with_a_checkpoint_is_told_at_the_opening(tmp_path: Path) -> None:
    assert "has no trainer.json (name the folder of a step)" in refused(tmp_path)
    write_step(tmp_path, heads=0)
    assert "heads must be a positive integer, not 0" in refused(tmp_path)
    write_step(tmp_path, kv_heads=3)
    assert "3 kv_heads cannot be split over 2 ranks" in refused(tmp_path)
    write_step(tmp_path, head_dim=4)
    assert "has 12 rows on each rank, and trainer.json says 16" in refused(tmp_path)
    write_step(tmp_path, vocab_size=17)
    assert "has 16 rows on 2 ranks, and trainer.json says that the vo" in refused(tmp_path)
    (tmp_path / "trainer.json").write_text("{")
    assert "trainer.json cannot be read: JSONDecodeError" in refused(tmp_path)
    write_step(tmp_path)
    (tmp_path / "rank-01.safetensors").unlink()
    assert "lacks rank-01.safetensors of 2 ranks" in refused(tmp_path)


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    write_step(tmp_path)
    first, second = shards(2)
    save_file({**second, "final_norm.scale": torch.ones(9)}, tmp_path / "rank-01.safetensors")
    assert "rank-00.safetensors has final_norm.scale float32[8], rank-01" in refused(tmp_path)
    for rank, part in enumerate((first, second)):
        save_file(
            {**part, "router.weight": torch.ones(2)}, tmp_path / f"rank-{rank:02d}.safetensors"
        )
    assert refused(tmp_path).startswith("router.weight: streamer-plugin-example has no rule for it")


def test_the_command_line_has_it(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "streamer", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    lines = [line.split("\t") for line in run("sources").splitlines()]
    assert ["acme", "acme", "streamer-plugin-example"] in [[s, p, d] for s, _, p, d in lines]
    assert "model.layers.1.self_attn.k_proj.weight" in run(
        "plan", f"acme://{write_step(tmp_path)}", "--tensors"
    )
