"""A tiny model and its data."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def model() -> Any:
    """A Qwen3 of two layers with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config)


@pytest.fixture
def adapted(model: Any) -> Any:
    """The model with LoRA on every linear layer."""
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))


@pytest.fixture
def data() -> list[dict[str, torch.Tensor]]:
    """Random tokens."""
    tokens = torch.randint(0, 96, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.fixture
def unused_url() -> Iterator[str]:
    """Where nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"
