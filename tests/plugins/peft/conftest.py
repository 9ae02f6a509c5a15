"""Tiny models with adapters that are not zero, and what PEFT itself makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamer import Payload, TensorSpec, WeightSource
from streamer.source import checked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def llama(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Any:
    """A Llama of two layers, always with the same values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def gpt2(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A GPT-2, whose linear layers are stored as (in, out), and which has biases."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).to(dtype).eval()


def stir(model: Any) -> Any:
    """Give every adapter weight, and every bias that is trained, a value of its own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.add_(noise.to(parameter.dtype))
    return model


@pytest.fixture(scope="session")
def adapt() -> Callable[..., Any]:
    """`peft.get_peft_model` with an adapter that is not zero."""

    def make(model: Any, config: Any = None, **options: Any) -> Any:
        return stir(peft.get_peft_model(model, config or peft.LoraConfig(**options)))

    return make


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    """`llama`."""
    return llama


@pytest.fixture(scope="session")
def make_gpt2() -> Callable[..., Any]:
    """`gpt2`."""
    return gpt2


@pytest.fixture(scope="session")
def sent() -> Callable[[WeightSource], dict[str, torch.Tensor]]:
    """What a source sends, held against its specs."""

    def read(payload: Payload, spec: TensorSpec) -> torch.Tensor:
        if isinstance(payload, torch.Tensor):
            return payload.clone()
        data = bytearray(spec.nbytes)
        payload.read_into(memoryview(data), 0, spec.nbytes)
        return torch.frombuffer(data, dtype=spec.dtype).view(spec.shape)

    def collect(source: WeightSource) -> dict[str, torch.Tensor]:
        specs = source.specs()
        return {
            spec.name: read(payload, spec)
            for spec, payload in zip(specs, checked(source, specs), strict=True)
        }

    return collect


@pytest.fixture(scope="session")
def same() -> Callable[..., bool]:
    """Same names in the same order, and the same bits."""

    def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
        return list(found) == list(expected) and all(
            found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
            for name, tensor in expected.items()
        )

    return compare
