"""An adapter's folder over a base: bit for bit what PEFT makes of the two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from streamer_peft.adapter import AdapterSource

import streamer
from streamer import DeferredTensor, SourceError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Sent = Callable[..., dict[str, torch.Tensor]]
Same = Callable[..., bool]
Saved = Callable[..., tuple[Path, Path, dict[str, torch.Tensor]]]


@pytest.fixture
def saved(tmp_path: Path, adapt: Any) -> Saved:
    """Base and adapter as PEFT saves them, and the merged model that it makes of them."""

    def save(model: Any, **options: Any) -> tuple[Path, Path, dict[str, torch.Tensor]]:
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        model.save_pretrained(base)
        adapt(model, **options).save_pretrained(adapter)
        fresh = type(model).from_pretrained(base, dtype="auto")
        merged = peft.PeftModel.from_pretrained(fresh, adapter).merge_and_unload()
        names = set(load_file(base / "model.safetensors"))
        state = {
            name: tensor
            for name, tensor in merged.state_dict().items()
            if name in names or "modules_to_save" in options
        }
        return base, adapter, state

    return save


def agree(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], same: Same) -> bool:
    """Whether they hold the same; a base's file has an order of its own."""
    return same({name: found[name] for name in sorted(found)}, dict(sorted(expected.items())))


LORA = {
    "all linear": {"target_modules": ALL, "r": 3, "lora_alpha": 7},
    "patterns": {
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"layers.0.mlp.up_proj": 5, "^model.layers.1.mlp.up_proj": 6},
    },
    "dora": {"target_modules": ALL, "use_dora": True},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "another start": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_lora_is_merged_as_peft_does(
    make_llama: Any, saved: Saved, sent: Sent, same: Same, options: Any, tied: bool
) -> None:
    base, adapter, merged = saved(make_llama(tied=tied), **options)
    source = streamer.open_source(f"peft://{adapter}?base={base}")
    found = sent(source)
    assert agree(found, merged, same)
    assert same(sent(source), found)
    plain = load_file(base / "model.safetensors")
    assert any(not torch.equal(found[name], plain[name]) for name in plain)
    source.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["c_attn", "c_proj", "c_fc"]},
        {"target_modules": ["attn.c_proj"]},  # square matrices alone
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
        {"target_modules": ["c_attn"], "bias": "all"},
        {"target_modules": ["c_attn"], "bias": "lora_only"},
        {"target_modules": ["c_attn"], "lora_bias": True},
        {"target_modules": ["c_attn"], "lora_bias": True, "bias": "all"},
    ],
    ids=["transposed", "square", "dora", "all biases", "biases", "bias of B", "both biases"],
)
def test_transposed_layers_and_biases(
    make_gpt2: Any, saved: Saved, sent: Sent, same: Same, options: Any, dtype: torch.dtype
) -> None:
    base, adapter, merged = saved(make_gpt2(dtype), **options)
    with_base = streamer.open_source(str(adapter), scheme="peft", base=str(base))
    assert agree(sent(with_base), merged, same)
    with_base.close()


def test_the_rest_of_an_adapter_says_how_square_matrices_lie(
    make_gpt2: Any, saved: Saved, sent: Sent, same: Same
) -> None:
    base, adapter, merged = saved(make_gpt2(), target_modules=["c_attn", "c_proj"])
    _edit(adapter, fan_in_fan_out=False)
    with closing(AdapterSource(str(adapter), base)) as source:
        assert agree(sent(source), merged, same)


def test_a_base_is_anything(
    make_llama: Any, saved: Saved, sent: Sent, same: Same, leaks: Callable[[], Any]
) -> None:
    base, adapter, merged = saved(make_llama(), target_modules=ALL)
    model = make_llama()
    before = leaks()["fds"]
    module = streamer.open_source(model)
    for anything in (base, f"safetensors://{base}", model, module, model.state_dict):
        source = AdapterSource(str(adapter), anything)
        assert agree(sent(source), merged, same)
        source.close()
    plain = make_llama().state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.state_dict().items())
    again = f"peft://{adapter}?base=peft://{adapter}?base={base}"
    source = streamer.open_source(again)
    assert not agree(sent(source), merged, same)
    source.close()
    renamed = streamer.rename(module, "^", "x.")
    with pytest.raises(SourceError, match=r"changes model.layers.0.*, which is not in the base"):
        AdapterSource(str(adapter), renamed)
    assert leaks()["fds"] == before


def test_what_the_adapter_leaves_alone_stays_in_its_file(make_llama: Any, saved: Saved) -> None:
    base, adapter, _ = saved(make_llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with closing(streamer.open_source(f"peft://{adapter}?base={base}")) as source:
        payloads = dict(source)
    merged = {name for name, payload in payloads.items() if isinstance(payload, torch.Tensor)}
    assert merged == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert all(
        isinstance(payload, DeferredTensor)
        for name, payload in payloads.items()
        if name not in merged
    )


def test_the_version_of_the_base_is_not_that_of_the_sum(
    make_llama: Any, saved: Saved, make_source: Any
) -> None:
    _, adapter, _ = saved(make_llama(), target_modules=["q_proj"])
    base = make_source(dict(make_llama().state_dict()), weight_version="commit")
    source = AdapterSource(str(adapter), base)
    assert source.weight_version is None
    source.close()
    assert base.closed == 0


def test_a_base_may_be_slow(by_hand: Any, make_source: Any) -> None:
    base = make_source(BASE)
    base.progress = lambda: 17
    with closing(AdapterSource(str(by_hand()), base)) as source:
        assert source.progress() == 17


def test_a_head_that_was_tied_is_warned_of(
    make_llama: Any, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter, _ = saved(
        make_llama(tied=True), target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    with closing(streamer.open_source(f"peft://{adapter}?base={base}")) as source:
        assert source.specs()[-1].name == "lm_head.weight"
    assert "adds lm_head.weight to the base (a server with tied" in caplog.text


def test_a_file_that_changes_is_told(make_llama: Any, saved: Saved) -> None:
    base, adapter, _ = saved(make_llama(), target_modules=["q_proj"])
    with closing(streamer.open_source(f"peft://{adapter}?base={base}")) as source:
        os.utime(adapter / "adapter_model.safetensors", ns=(0, 0))
        with pytest.raises(SourceError, match="was rewritten in place"):
            list(source)


# What is refused, shown with adapters written by hand


def _edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content).replace("Infinity", "1e999"))


@pytest.fixture
def by_hand(tmp_path: Path) -> Callable[..., Path]:
    """Write an adapter of rank 2 for ``a`` [4, 6], with changes to configuration and tensors."""

    def write(tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
        folder = tmp_path / "by hand"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
        _edit(folder, **changes)
        plain = {"a.lora_A.weight": torch.ones(2, 6), "a.lora_B.weight": torch.ones(4, 2)}
        for name in [name for name, tensor in (tensors or {}).items() if tensor is None]:
            del plain[name]
        given = {name: tensor for name, tensor in (tensors or {}).items() if tensor is not None}
        state = {f"base_model.model.{k}": v for k, v in {**plain, **given}.items()}
        save_file(state, folder / "adapter_model.safetensors")
        return folder

    return write


BASE = {"a.weight": torch.zeros(4, 6), "q.weight": torch.zeros(4, 6, dtype=torch.uint8)}


def test_by_hand_it_works(by_hand: Any, sent: Sent) -> None:
    with closing(AdapterSource(str(by_hand(lora_alpha=3)), BASE)) as source:
        found = sent(source)
    assert torch.equal(found["a.weight"], torch.full((4, 6), 3.0))
    assert torch.equal(found["q.weight"], BASE["q.weight"])
    several = by_hand(lora_alpha=3, use_rslora=True, alpha_pattern={"b": 9, "[a]": 5})
    with closing(AdapterSource(str(several), BASE)) as source:
        found = sent(source)
    assert torch.equal(found["a.weight"], torch.full((4, 6), 2.0) * (5 / 2**0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "is of the method LOHA, not LORA: merge it with PEFT"),
        ({"init_lora_weights": "pissa_niter_4"}, "='pissa_niter_4' has changed the base weights"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] is nothing that can be"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\] is nothing"),
        ({"target_parameters": ["x"]}, r"target_parameters=\['x'\] is nothing that can be"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_of_tomorrow": True}, "use_of_tomorrow=True is nothing that can be merged here"),
        ({"r": 0}, "r is 0, not a number that can be right"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, not a number that can be right"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10000.*, not a number that can be right"),
        ({"alpha_pattern": {"a": float("inf")}}, "alpha_pattern is no object of positive numbers"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern: \( is no regular expression"),
        ({"alpha_pattern": {"a": -1}}, "alpha_pattern is no object of positive numbers"),
        ({"r": 3}, "a has rank 2 without DoRA, and the configuration says rank 3 without DoRA"),
        ({"use_dora": True}, "a has rank 2 without DoRA, and the configuration says rank 2 with D"),
    ],
)
def test_a_configuration_that_is_not_merged_here_is_told(
    by_hand: Any, changes: Any, message: str
) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        AdapterSource(str(by_hand(**changes)), BASE)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.lora_B.weight": None}, "a needs a pair of A and B"),
        (
            {"a.lora_B.weight": torch.ones(4, 3)},
            r"a has A \[2, 6\] and B \[4, 3\], which are no two",
        ),
        *(
            (
                {"a.lora_B.weight": torch.ones(4, 2).to(dtype)},
                r"a\.lora_B\.weight \w+\[4, 2\] is no plain float, which a merge needs",
            )
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64)
        ),
        ({"a.lora_B.bias": torch.ones(4, dtype=torch.int8)}, r"int8\[4\] is no plain float"),
        (
            {"a.lora_B.weight": torch.ones(4, 2, dtype=torch.float64)},
            "a has A in float32 and B in float64, which cannot be multiplied",
        ),
        ({"a.lora_A.weight": torch.ones(2, 6, 1, 1)}, r"A \[2, 6, 1, 1\] and B"),
        (
            {"a.lora_A.weight": torch.ones(2, 5)},
            r"a.weight is \[4, 6\] in the base, and the adapter",
        ),
        (
            {"a.lora_magnitude_vector": torch.ones(4)},
            "a has rank 2 with DoRA, and the configuration",
        ),
        ({"a.lora_B.bias": torch.ones(4)}, "the adapter changes a.bias, which is not in the base"),
        ({"a.lora_arrow.x": torch.ones(4)}, "a.lora_arrow.x is nothing that can be merged"),
        (
            {"e.token_adapter.trainable_tokens_delta": torch.ones(4)},
            "trainable_tokens_delta is noth",
        ),
        (
            {"q.weight": torch.ones(4, 6)},
            r"replaces q.weight uint8\[4, 6\], a dtype that it cannot",
        ),
        (
            {"q.lora_A.weight": torch.ones(2, 6), "q.lora_B.weight": torch.ones(4, 2)},
            r"changes q.weight uint8\[4, 6\], and it can be merged only into plain floats",
        ),
        (
            {"x.lora_A.weight": torch.ones(2, 6), "x.lora_B.weight": torch.ones(4, 2)},
            r"changes x.weight, which is not in the base \(there is a.weight, for one\)",
        ),
        (
            {"a.lora_embedding_A": torch.ones(2, 4), "a.lora_embedding_B": torch.ones(6, 2)},
            "a needs a pair of A and B, and nothing that is not known here",
        ),
        ({"a.lora_A.weight": None, "a.lora_B.weight": None}, "nothing to merge|holds no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_told(by_hand: Any, tensors: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        AdapterSource(str(by_hand(tensors)), BASE)
    assert str(caught.value).isprintable()


def test_what_is_no_adapter_is_told(tmp_path: Path, by_hand: Any) -> None:
    with pytest.raises(
        SourceError, match=r"no folder of a PEFT adapter: cannot open adapter_config"
    ):
        streamer.open_source(f"peft://{tmp_path}?base=x")
    with pytest.raises(UsageError, match=r"say what it was trained on with base=.*says org/name"):
        AdapterSource(str(by_hand(base_model_name_or_path="org/name")), None)
    folder = by_hand()
    with pytest.raises(UsageError, match="the base is given twice: y and x"):
        streamer.open_source(f"peft://{folder}?base=x", base="y")
    for query in ("?bases=x", "?base", "?base="):
        with pytest.raises(UsageError, match=r"behind \? comes base=CHECKPOINT and nothing else"):
            streamer.open_source(f"peft://{folder}{query}")
    with pytest.raises(UsageError, match="takes no option tied"):
        streamer.open_source(str(folder), scheme="peft", tied="all")
    with pytest.raises(SourceError, match="no such file or folder: no/such/base"):
        streamer.open_source(f"peft://{folder}?base=no%2Fsuch/base")
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(
        SourceError, match="is not an adapter's configuration: it is no JSON object"
    ):
        AdapterSource(str(folder), BASE)
    by_hand()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"has its weights in adapter_model.bin, a pickle"):
        AdapterSource(str(folder), BASE)


# End to end


@pytest.mark.parametrize("packed", [True, False])
def test_both_workers_hold_the_merged_weights(
    server: Any, make_llama: Any, saved: Saved, packed: bool
) -> None:
    """From the command line, cast on the way, without PEFT in the process."""
    base, adapter, merged = saved(
        make_llama(torch.float32),
        target_modules=[*ALL, "embed_tokens"],
        modules_to_save=["lm_head"],
    )
    code = "import sys; sys.modules['peft'] = None; from streamer.cli import main; main()"
    arguments = ["push", f"peft://{adapter}?base={base}", "--to", server.url, "--cast", "bfloat16"]
    arguments += ["--buffer-size", "2000B", "--rename", f"^={packed}.", *["--per-tensor"][packed:]]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pushed {len(merged)} tensors" in done.stdout
    assert server.holds({f"{packed}.{k}": v.bfloat16() for k, v in merged.items()})
    plain = load_file(base / "model.safetensors")
    assert not server.holds({f"{packed}.{k}": v.bfloat16() for k, v in plain.items()})


def test_another_scaling_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, make_llama: Any, saved: Saved, sent: Sent, same: Same
) -> None:
    base, adapter, merged = saved(make_llama(), target_modules=ALL)
    monkeypatch.setattr("streamer_peft.config.AdapterConfig.scaling_of", lambda *_: 1.01)
    with closing(AdapterSource(str(adapter), base)) as source:
        assert not agree(sent(source), merged, same)
