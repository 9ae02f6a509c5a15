"""A live PEFT model: bit for bit what PEFT's own merge leaves, and the model as it was."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import streamer
from streamer import SourceError, UsageError

# PEFT and transformers warn of a lot that is meant to be here.
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Sent = Callable[..., dict[str, torch.Tensor]]
Same = Callable[..., bool]


class Vision(nn.Module):
    """What a language model does not have: convolutions and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2)
        self.patches = nn.Conv2d(3, 8, 3)
        self.pointwise = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 6)


class Experts(nn.Module):
    """Fused experts: parameters that are no linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.randn(4, 8, 6))
        self.experts.down = nn.Parameter(torch.randn(4, 6, 8))
        self.router = nn.Linear(8, 4)


LORA = {
    "all linear": {"target_modules": ALL},
    "rank and alpha patterns": {
        "target_modules": ALL,
        "use_rslora": True,
        "r": 5,
        "lora_alpha": 3,
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"layers.0.mlp.up_proj": 7},
    },
    "dora": {"target_modules": ALL, "use_dora": True},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora of embeddings": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
}


def check(model: Any, sent: Sent, same: Same) -> dict[str, torch.Tensor]:
    """Push-like reading of ``model`` against PEFT's merge, and that the model stays as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = streamer.open_source(model)
    found = sent(source)
    assert same(sent(source), found)
    assert same(dict(model.state_dict()), before)
    merged = model.merge_and_unload().state_dict()
    assert same(found, merged)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_lora_is_merged_as_peft_does(
    make_llama: Any, adapt: Any, sent: Sent, same: Same, dtype: Any, tied: bool, options: Any
) -> None:
    model = adapt(make_llama(dtype, tied), **options)
    plain = make_llama(dtype, tied).state_dict()
    found = check(model, sent, same)
    assert found.keys() == plain.keys()
    assert any(not torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["c_attn", "c_proj"]},
        {"target_modules": ["c_attn"], "bias": "all"},
        {"target_modules": ["c_attn"], "bias": "lora_only"},
        {"target_modules": ["c_attn"], "lora_bias": True},
    ],
    ids=["transposed", "all biases", "biases", "bias of B"],
)
def test_transposed_layers_and_biases(
    make_gpt2: Any, adapt: Any, sent: Sent, same: Same, options: Any
) -> None:
    check(adapt(make_gpt2(torch.float16), **options), sent, same)


def test_other_layers_and_fused_experts(adapt: Any, sent: Sent, same: Same) -> None:
    targets = ["attention", "patches", "pointwise", "head"]
    check(adapt(Vision(), target_modules=targets), sent, same)
    parameters = ["experts.gate_up", "experts.down"]
    check(adapt(Experts(), target_modules=["router"], target_parameters=parameters), sent, same)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LoHaConfig(target_modules=["q_proj"]),
        peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        peft.ShiraConfig(target_modules=["q_proj"], r=2),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_methods_other_than_lora(
    make_llama: Any, adapt: Any, sent: Sent, same: Same, config: Any
) -> None:
    check(adapt(make_llama(torch.float32), config), sent, same)


def test_a_tied_weight_that_is_changed_twice_is_warned_of(
    make_llama: Any, adapt: Any, sent: Sent, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    check(adapt(make_llama(tied=True), target_modules=["embed_tokens", "lm_head"]), sent, same)
    (record,) = caplog.records
    assert "model.embed_tokens.weight is tied, and the adapter changes it in 2 places" in (
        record.getMessage()
    )


def test_all_active_adapters_are_merged_and_no_others(
    make_llama: Any, adapt: Any, sent: Sent, same: Same
) -> None:
    def make() -> Any:
        model = adapt(make_llama(), target_modules=["q_proj", "v_proj"])
        for name, targets in (("second", ["q_proj", "up_proj"]), ("third", ["o_proj"])):
            model.add_adapter(name, peft.LoraConfig(target_modules=targets, r=3))
            model.base_model.set_adapter(name)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    nn.init.normal_(parameter, std=0.1)
        model.base_model.set_adapter(["default", "second"])
        return model

    found = check(make(), sent, same)
    plain = make_llama().state_dict()
    changed = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], found[name])}
    assert changed == {"q_proj", "v_proj", "up_proj"}


def test_what_is_merged_already_goes_as_it_is(
    make_llama: Any, adapt: Any, sent: Sent, same: Same
) -> None:
    expected = adapt(make_llama(), target_modules=ALL).merge_and_unload().state_dict()
    model = adapt(make_llama(), target_modules=ALL)
    model.merge_adapter()
    assert same(sent(streamer.open_source(model)), dict(expected))


def test_it_is_found_without_its_outer_class_and_inside_wrappers(
    make_llama: Any, adapt: Any, sent: Sent, same: Same
) -> None:
    expected = check(adapt(make_llama(), target_modules=ALL), sent, same)
    model = adapt(make_llama(), target_modules=ALL)
    layers = model.base_model.model.model.layers
    layers[1] = checkpoint_wrapper(layers[1])
    layers[0].mlp.up_proj.base_layer = torch.compile(layers[0].mlp.up_proj.base_layer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert same(sent(streamer.open_source(torch.compile(model))), expected)
    assert same(sent(streamer.open_source(model.base_model.model)), expected)
    assert same(dict(model.state_dict()), weights)


def test_the_adapter_stays_and_the_next_step_is_sent(
    make_llama: Any, adapt: Any, sent: Sent, same: Same
) -> None:
    model = adapt(make_llama(torch.float32), target_modules=ALL, lora_dropout=0.1).eval()
    ids = torch.arange(8)[None]
    source = streamer.open_source(model)
    before, first = model(ids).logits, sent(source)
    assert torch.equal(model(ids).logits, before)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    second = sent(source)
    assert not same(second, first)
    assert same(second, dict(model.merge_and_unload().state_dict()))


def test_no_more_than_one_layer_is_held(
    monkeypatch: pytest.MonkeyPatch, make_llama: Any, adapt: Any
) -> None:
    model = adapt(make_llama(), target_modules=ALL)
    source = streamer.open_source(model)
    alive: dict[int, int] = {}
    clone = torch.clone

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copy = clone(tensor)
        number = len(alive)
        alive[number] = copy.untyped_storage().nbytes()
        weakref.finalize(copy.untyped_storage(), alive.__setitem__, number, 0)
        return copy

    monkeypatch.setattr(torch, "clone", counted)
    most = 0
    for _, tensor in source:
        most = max(most, sum(alive.values()))
        del tensor
    layers = [part for part in model.modules() if hasattr(part, "base_layer")]
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    assert len(alive) == 3 * len(layers)
    assert 0 < most <= largest


# What is refused


def test_it_is_never_sent_raw(make_llama: Any, adapt: Any) -> None:
    """Case 32."""
    model = adapt(make_llama(), target_modules=["q_proj"])
    with pytest.raises(SourceError, match=r"it is a PEFT model, .* the source peft merges them"):
        streamer.open_source(model, scheme="module")
    with pytest.raises(SourceError, match=r"^base_model\.model\..* belongs to an adapter"):
        streamer.open_source(model.state_dict())
    with pytest.raises(SourceError, match=r"q_proj\.base_layer\.weight belongs to an adapter"):
        streamer.open_source(model.base_model.model.state_dict())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            peft.LoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1]
            ),
            r"q_proj.base_layer.weight: PEFT cannot merge its Linear layer: NotImplementedError",
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "its adapter is made of prompts, not of weights",
        ),
        (
            peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
            "adaption_prompt is of a AdaptedAttention, which cannot be merged",
        ),
        (
            peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]),
            "its adapter replicates layers, which share their weights",
        ),
    ],
    ids=["alora", "prompt", "adaption", "replication"],
)
def test_what_cannot_be_merged_is_told_at_the_opening(
    make_llama: Any, config: Any, message: str
) -> None:
    model = peft.get_peft_model(make_llama(), config)
    with pytest.raises(SourceError, match=message):
        streamer.open_source(model)


def test_a_layer_without_a_bias_cannot_take_one(make_llama: Any, adapt: Any) -> None:
    model = adapt(make_llama(), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(SourceError, match="the base layer has no bias"):
        streamer.open_source(model)


def test_meta_and_sharded_weights_are_named(
    make_llama: Any, adapt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapt(make_llama(), target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_B["default"].to("meta")
    with pytest.raises(SourceError, match=r"q_proj.lora_B.default.weight is on the meta device"):
        streamer.open_source(model)
    layer.base_layer.to("meta")
    with pytest.raises(SourceError, match=r"q_proj.base_layer.weight is on the meta device"):
        streamer.open_source(model)
    monkeypatch.setattr("streamer_peft.module.is_sharded", lambda model: True)
    with pytest.raises(
        SourceError, match="it is sharded over ranks, and adapters merge into whole"
    ):
        streamer.open_source(model)


def test_options_that_do_not_apply_are_named(make_llama: Any, adapt: Any) -> None:
    model = adapt(make_llama(tied=True), target_modules=["q_proj"])
    with pytest.raises(UsageError, match="it takes no option base"):
        streamer.open_source(model, scheme="peft", base="x")
    with pytest.raises(UsageError, match="tied must be one of all, first"):
        streamer.open_source(model, scheme="peft", tied="no")
    first = streamer.open_source(model, scheme="peft", tied="first")
    assert len(first.specs()) == len(streamer.open_source(model).specs()) - 1
    with pytest.raises(SourceError, match="the source peft takes a PEFT model or a folder, not 3"):
        streamer.open_source(3, scheme="peft")


def test_claims_are_disjoint(make_llama: Any, adapt: Any) -> None:
    from streamer.registry import default_registry

    model = adapt(make_llama(), target_modules=["q_proj"])
    for thing, scheme in (
        (model, "peft"),
        (make_llama(), "module"),
        (model.state_dict(), "module"),
    ):
        claims = [
            entry.scheme
            for entry in default_registry().entries.values()
            if entry.accepts is not None and entry.accepts(thing)
        ]
        assert claims == [scheme]


def test_peft_is_not_imported_before_it_is_there() -> None:
    code = """
import sys, torch, streamer
source = streamer.open_source(torch.nn.Linear(1, 1))
assert len(source.specs()) == 2
assert not {"peft", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# End to end


@pytest.mark.parametrize("packed", [True, False])
def test_both_workers_hold_the_merged_weights(
    server: Any, make_llama: Any, adapt: Any, packed: bool
) -> None:
    model = adapt(
        make_llama(torch.bfloat16 if packed else torch.float16),
        target_modules=[*ALL, "embed_tokens"],
        modules_to_save=["lm_head"],
    )
    raw = dict(make_llama(torch.bfloat16 if packed else torch.float16).state_dict())
    report = streamer.push(model, to=server.url, packed=packed, buffer_size=2000)
    merged = dict(model.merge_and_unload().state_dict())
    assert report.tensors == len(merged)
    assert server.holds(merged)
    assert not server.holds(raw)


# That these tests would notice


@pytest.mark.parametrize("fault", ["no copy", "no merge"])
def test_a_merge_gone_wrong_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, make_llama: Any, adapt: Any, sent: Sent, same: Same, fault: str
) -> None:
    model = adapt(make_llama(), target_modules=ALL)
    if fault == "no copy":
        monkeypatch.setattr("streamer_peft.scratch.Scratch.copy", lambda self, module: module)
    else:
        monkeypatch.setattr(
            "streamer_peft.module._merge_copies",
            lambda layers, scratch: [scratch.copy(layers[0]).get_base_layer()],
        )
    with pytest.raises((AssertionError, SourceError)):
        check(model, sent, same)
