"""Write tiny random Qwen3 checkpoints, in shards with an index: make_checkpoint.py FOLDER:SEED ...

Run by the Python of vLLM's environment, which has transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    dtype="bfloat16",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
SHARDS = 3


def write_tokenizer(folder: Path) -> None:
    """One token a byte: prompts are token ids, so nothing more is needed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_checkpoint(folder: Path, seed: int) -> None:
    """Weights so large that another seed gives other tokens at once."""
    CONFIG.save_pretrained(folder)
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(CONFIG).named_parameters())
    weight_map: dict[str, str] = {}
    per_shard = -(-len(parameters) // SHARDS)
    for number in range(SHARDS):
        names = list(parameters)[number * per_shard : (number + 1) * per_shard]
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {}
        for name in names:
            noise = torch.randn(parameters[name].shape, generator=generator) * 0.3
            tensors[name] = (noise + 1 if noise.ndim == 1 else noise).bfloat16()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path, _, seed = argument.rpartition(":")
        write_checkpoint(Path(path), int(seed))
