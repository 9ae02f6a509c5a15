"""Write a tiny random Qwen3 in float32 with a tokenizer: make_model.py FOLDER

Run by the Python of `.trl`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "interop"))
from make_checkpoint import CONFIG, write_tokenizer

if __name__ == "__main__":
    torch.manual_seed(0)
    CONFIG.dtype = torch.float32
    model = Qwen3ForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)  # other weights give other tokens at once
    folder = Path(sys.argv[1])
    model.save_pretrained(folder)
    write_tokenizer(folder)
