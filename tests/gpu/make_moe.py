"""Write a small random Qwen3-MoE checkpoint under Hugging Face names: DIR TOKENIZER_DIR SEED."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, HEADS, KV_HEADS, HEAD = 512, 256, 4, 16, 8, 4, 64
VOCABULARY = 640


def main(folder: Path, tokenizer: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).bfloat16()

    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{base}.post_attention_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{base}.self_attn.q_norm.weight": torch.ones(HEAD).bfloat16(),
            f"{base}.self_attn.k_norm.weight": torch.ones(HEAD).bfloat16(),
            f"{base}.self_attn.q_proj.weight": weight(HEADS * HEAD, HIDDEN),
            f"{base}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{base}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{base}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD),
            f"{base}.mlp.gate.weight": weight(EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            experts = f"{base}.mlp.experts.{expert}"
            tensors[f"{experts}.gate_proj.weight"] = weight(INTERMEDIATE, HIDDEN)
            tensors[f"{experts}.up_proj.weight"] = weight(INTERMEDIATE, HIDDEN)
            tensors[f"{experts}.down_proj.weight"] = weight(HIDDEN, INTERMEDIATE)
    tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    tensors["lm_head.weight"] = weight(VOCABULARY, HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
