"""Casting, renaming, choosing and mapping, over tensors and over what is still in a file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import streamer
from streamer import SourceError, SpecMismatch, TensorSpec, UsageError, WeightSource, payloads
from streamer.cli import make_app
from streamer.payloads import CastTensor
from streamer.plan import make_plan
from streamer.source import checked
from streamer.transformed import Output, Transformed
from streamer.transforms import CAST_DTYPES

BF16, F32 = torch.bfloat16, torch.float32


def collect(source: WeightSource) -> dict[str, torch.Tensor]:
    """What a source yields, held against its specs; deferred tensors are read in odd pieces."""
    specs = source.specs()
    found: dict[str, torch.Tensor] = {}
    for spec, payload in zip(specs, checked(source, specs), strict=True):
        if not isinstance(payload, torch.Tensor):
            data = bytearray(spec.nbytes)
            for start in range(0, spec.nbytes, 7):
                stop = min(start + 7, spec.nbytes)
                payload.read_into(memoryview(data)[start:stop], start, stop)
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            payload = (flat if data else flat.to(torch.uint8)).view(spec.dtype).view(spec.shape)
        found[spec.name] = payload.clone()
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Same names in the same order, same dtypes, shapes and bits."""
    return list(found) == list(expected) and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )
        for name, tensor in expected.items()
    )


@pytest.fixture(scope="module")
def weights(random_tensor: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """A little of everything, with finite floats."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model.embed.weight": torch.randn(8, 6, generator=generator),
        "model.layers.0.qkv.weight": torch.randn(9, 5, generator=generator),
        "model.layers.0.mlp.weight": random_tensor(torch.float8_e4m3fn, (6, 4)),
        "model.layers.0.mlp.weight_scale_inv": torch.randn((), generator=generator),
        "model.layers.0.norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "model.layers.0.empty": torch.empty(0, 3),
        "model.ids": torch.arange(4),
        "lm_head.weight": torch.randn(6, 8, generator=generator).T,
    }


def cast_values(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What `cast` should make of ``weights``."""
    untouched = ("model.layers.0.mlp.weight", "model.layers.0.mlp.weight_scale_inv", "model.ids")
    return {
        name: tensor if name in untouched else tensor.to(dtype) for name, tensor in weights.items()
    }


# Cast


def test_only_plain_floats_are_cast(make_source: Any, weights: dict[str, torch.Tensor]) -> None:
    for dtype, target in (("bfloat16", BF16), ("torch.float16", torch.float16), (F32, F32)):
        source = streamer.cast(make_source(weights), dtype)
        assert same(collect(source), cast_values(weights, target))


def test_names_can_be_kept(make_source: Any, weights: dict[str, torch.Tensor]) -> None:
    kept = streamer.cast(make_source(weights), BF16, keep=["*embed*", "lm_head.*"])
    found = collect(kept)
    assert found["model.embed.weight"].dtype == found["lm_head.weight"].dtype == F32
    assert found["model.layers.0.qkv.weight"].dtype == BF16
    with pytest.raises(UsageError, match=r"keep: 'lmhead' matches none of the names"):
        streamer.cast(make_source(weights), BF16, keep=["lmhead"])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", torch.complex64, "bf16"])
def test_a_dtype_that_needs_more_than_a_cast_is_refused(make_source: Any, dtype: Any) -> None:
    with pytest.raises(UsageError, match="cast: dtype must be one of bfloat16, float16, float32"):
        streamer.cast(make_source({"a": torch.ones(1)}), dtype)


def test_deferred_tensors_are_cast_as_they_are_read(
    make_source: Any, deferred: Any, weights: dict[str, torch.Tensor]
) -> None:
    late = {name: deferred(tensor) for name, tensor in weights.items()}
    source = streamer.cast(make_source(late), BF16)
    payload_of = dict(source)
    assert all(payload.parts == [] for payload in late.values())
    assert payload_of["model.ids"] is late["model.ids"]
    assert isinstance(payload_of["model.embed.weight"], CastTensor)
    assert same(collect(source), cast_values(weights, BF16))


@given(
    count=st.integers(0, 70),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    step=st.integers(1, 20),
    dtypes=st.permutations(CAST_DTYPES),
)
def test_any_pieces_of_a_deferred_cast_make_the_whole(
    deferred: Any, count: int, cuts: list[int], step: int, dtypes: list[torch.dtype]
) -> None:
    old, new = dtypes[:2]
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(old)
    late = CastTensor(deferred(tensor), old, new)
    data = bytearray(count * new.itemsize)
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "_BLOCK", step)
        patch.setattr(payloads, "_STEP", max(step // 2, 1))
        for start, stop in itertools.pairwise(ends):
            late.read_into(memoryview(data)[start:stop], start, stop)
    assert bytes(data) == bytes(tensor.to(new).view(torch.uint8).tolist())
    assert all(stop - start <= step * old.itemsize for start, stop in late.payload.parts)


def test_a_deferred_cast_holds_a_block_at_most(deferred: Any) -> None:
    late = deferred(torch.zeros(1))
    late.data = bytes(5 << 20)
    cast = CastTensor(late, F32, BF16)
    cast.read_into(memoryview(bytearray(5 << 19)), 0, 5 << 19)
    assert max(stop - start for start, stop in late.parts) == payloads._BLOCK * 4 == 1 << 20
    assert sum(stop - start for start, stop in late.parts) == 5 << 20


# Rename


def test_three_ways_to_rename(make_source: Any, deferred: Any) -> None:
    a, b = torch.ones(2), deferred(torch.zeros(3))
    pairs = {"model.a": a, "model.b": b}
    for source, names in [
        (streamer.rename(make_source(pairs), {"model.a": "x"}), ["x", "model.b"]),
        (streamer.rename(make_source(pairs), r"^model\.", ""), ["a", "b"]),
        (
            streamer.rename(make_source(pairs), re.compile(r"(\w)$"), r"\1.w"),
            ["model.a.w", "model.b.w"],
        ),
        (streamer.rename(make_source(pairs), str.upper), ["MODEL.A", "MODEL.B"]),
        (
            streamer.rename(make_source(pairs), {"model.a": "model.b", "model.b": "model.a"}),
            ["model.b", "model.a"],
        ),
    ]:
        found = list(source)
        assert [name for name, _ in found] == names == [spec.name for spec in source.specs()]
        assert found[0][1] is a
        assert found[1][1] is b
    assert b.parts == []


OTHERWISE = ": rename one otherwise, or exclude it"


def broken(_: Any) -> Any:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"model.a": "model.b"},), f"model.a and model.b would both be called model.b{OTHERWISE}"),
        ((r"\.[ab]", ".c"), f"model.a and model.b would both be called model.c{OTHERWISE}"),
        (({"a": "b"},), "rename: the source has no tensor a"),
        (("modle", "x"), "rename: 'modle' is in none of the names, of which model.a is one"),
        (("(", "x"), r"rename: '(' to 'x': missing ), unterminated subpattern at position 0"),
        (("a", r"\2"), r"rename: 'a' to '\\2': invalid group reference 2 at position 1"),
        (("a", r"\g<q>"), r"rename: 'a' to '\\g<q>': unknown group name 'q'"),
        (("model",), "rename: a regular expression needs a replacement"),
        ((str.upper, "x"), "rename: a replacement goes with a regular expression only"),
        (("a", 5), "rename: 'a' to 5: decoding to str: need a bytes-like object, int found"),
        (
            (re.compile(b"a"), "b"),
            "rename: re.compile(b'a') to 'b': cannot use a bytes pattern on a string-like object",
        ),
        ((lambda name: None,), "rename: model.a would be called None"),
        ((lambda name: 5,), "rename: model.a would be called 5"),
        (
            (broken,),
            "rename: broken failed at model.a float32[1]: KeyError: 'no such layer'",
        ),
        (({"model.a": 5},), "rename: model.a would be called 5"),
        ((7,), "rename: give a mapping, a function or a regular expression, not 7"),
        ((".*", ""), "rename: model.a would be called ''"),
    ],
)
def test_names_that_cannot_be_are_named(
    make_source: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        streamer.rename(
            make_source({"model.a": torch.ones(1), "model.b": torch.ones(1)}), *arguments
        )
    assert str(caught.value) == message


# Select and exclude


def test_globs_choose(make_source: Any, weights: dict[str, torch.Tensor]) -> None:
    chosen = streamer.select(make_source(weights), "model.layers.0.[mn]*", "lm_head.weight")
    assert list(collect(chosen)) == [
        "model.layers.0.mlp.weight",
        "model.layers.0.mlp.weight_scale_inv",
        "model.layers.0.norm.weight",
        "lm_head.weight",
    ]
    rest = streamer.exclude(make_source(weights), "model.layers.*", "model.ids")
    assert list(collect(rest)) == ["model.embed.weight", "lm_head.weight"]
    assert same(collect(streamer.exclude(make_source(weights))), weights)


def test_what_is_not_chosen_is_not_read(make_source: Any, deferred: Any) -> None:
    a, b = deferred(torch.ones(2)), deferred(torch.ones(2))
    chosen = streamer.select(make_source({"a": a, "b": b}), "b")
    assert same(collect(chosen), {"b": torch.ones(2)})
    assert a.parts == []


@pytest.mark.parametrize("what", ["select", "exclude"])
def test_a_glob_that_matches_nothing_is_named(make_source: Any, what: str) -> None:
    message = f"{what}: 'layer.*' matches none of the names, of which layers.0 is one"
    with pytest.raises(UsageError) as caught:
        getattr(streamer, what)(make_source({"layers.0": torch.ones(1)}), "layers.*", "layer.*")
    assert str(caught.value) == message
    with pytest.raises(UsageError, match="select: give at least one glob"):
        streamer.select(make_source({"a": torch.ones(1)}))


@pytest.mark.parametrize("what", ["select", "exclude", "keep"])
def test_a_glob_that_is_no_text_is_named(make_source: Any, what: str) -> None:
    source = make_source({"a": torch.ones(1)})
    change: Any = {
        "select": lambda: streamer.select(source, "a", 5),  # type: ignore[arg-type]
        "exclude": lambda: streamer.exclude(source, "a", 5),  # type: ignore[arg-type]
        "keep": lambda: streamer.cast(source, "bfloat16", keep=[5]),  # type: ignore[list-item]
    }[what]
    with pytest.raises(UsageError) as caught:
        change()
    assert str(caught.value) == f"{what}: a glob is a text, not 5"


def test_one_glob_to_keep_may_be_a_text(make_source: Any) -> None:
    source = streamer.cast(make_source({"abc": torch.ones(1)}), "bfloat16", keep="ab*")
    assert source.specs()[0].dtype == F32


# Map


def export(spec: TensorSpec) -> list[Any] | None:
    """Split the fused projection, turn the head, drop the ids, rename the norm."""
    if spec.name.endswith(".qkv.weight"):
        rows = spec.shape[0] // 3
        return [
            (
                replace(spec, name=spec.name.replace("qkv", part), shape=(rows, spec.shape[1])),
                lambda tensor, at=number * rows, rows=rows: tensor[at : at + rows],
            )
            for number, part in enumerate("qkv")
        ]
    if spec.name == "lm_head.weight":
        return [(replace(spec, shape=spec.shape[::-1]), lambda tensor: tensor.T)]
    if spec.name == "model.ids":
        return []
    if spec.name.endswith("norm.weight"):
        return [(replace(spec, name="norm"), None)]
    return None


def exported(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `export` should make of ``weights``."""
    qkv = weights["model.layers.0.qkv.weight"]
    return {
        "model.embed.weight": weights["model.embed.weight"],
        "model.layers.0.q.weight": qkv[:3],
        "model.layers.0.k.weight": qkv[3:6],
        "model.layers.0.v.weight": qkv[6:],
        "model.layers.0.mlp.weight": weights["model.layers.0.mlp.weight"],
        "model.layers.0.mlp.weight_scale_inv": weights["model.layers.0.mlp.weight_scale_inv"],
        "norm": weights["model.layers.0.norm.weight"],
        "model.layers.0.empty": weights["model.layers.0.empty"],
        "lm_head.weight": weights["lm_head.weight"].T.contiguous(),
    }


def test_a_map_splits_turns_drops_and_renames(
    make_source: Any, deferred: Any, weights: dict[str, torch.Tensor]
) -> None:
    assert same(collect(streamer.map_tensors(make_source(weights), export)), exported(weights))
    late = {name: deferred(tensor) for name, tensor in weights.items()}
    assert same(collect(streamer.map_tensors(make_source(late), export)), exported(weights))
    assert late["model.layers.0.qkv.weight"].parts == [(0, 180)]  # once, for three
    assert late["model.ids"].parts == []


def test_a_map_that_does_not_keep_its_word_is_told(make_source: Any) -> None:
    source = streamer.map_tensors(
        make_source({"a": torch.ones(2, 3)}),
        lambda spec: [(replace(spec, name="b", shape=(3,)), lambda tensor: tensor[0].half())],
    )
    with pytest.raises(SpecMismatch, match=r"specs\(\) says b float32\[3\].* b float16\[3\]"):
        collect(source)


def nonsense(value: Any) -> Any:
    """A rule that returns ``value``."""

    def rule(spec: TensorSpec) -> Any:
        return value

    return rule


A = TensorSpec("a", torch.float32, (2,))
PAIRS = "must return pairs of a streamer.TensorSpec and a function or None, for a float32[2]: not"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (broken, "broken failed at a float32[2]: KeyError: 'no such layer'"),
        (nonsense(5), "RULE must return None or a list, for a float32[2]: not 5"),
        (nonsense(["b"]), f"RULE {PAIRS} 'b'"),
        (nonsense("b"), f"RULE {PAIRS} 'b'"),
        (nonsense([("b", None)]), f"RULE {PAIRS} ('b', None)"),
        (nonsense([(A, "half")]), f"RULE {PAIRS} ({A!r}, 'half')"),
        (nonsense([(A,)]), f"RULE {PAIRS} ({A!r},)"),
        (nonsense({A: None}), f"RULE {PAIRS} {A!r}"),
        (None, "the rule must be a function of a TensorSpec, not None"),
    ],
)
def test_a_rule_of_nonsense_is_told_with_the_tensor(
    make_source: Any, rule: Any, message: str
) -> None:
    """At once: before anything is pushed."""
    with pytest.raises(UsageError) as caught:
        streamer.map_tensors(make_source({"a": torch.ones(2)}), rule)
    message = message.replace("RULE", "nonsense.<locals>.rule")
    assert str(caught.value) == f"map_tensors: {message}"


def test_a_rule_may_be_a_generator(make_source: Any) -> None:
    def rule(spec: TensorSpec) -> Any:
        yield replace(spec, name="b"), None

    source = streamer.map_tensors(make_source({"a": torch.ones(2)}), rule)
    assert [name for name, _ in source] == ["b"]


def test_specs_that_fail_are_told_by_transforms_too(make_source: Any) -> None:
    source = make_source({"a": torch.ones(2)})
    source.specs = lambda: broken(None)
    with pytest.raises(SourceError, match=r"specs\(\) failed: KeyError: 'no such layer'"):
        streamer.cast(source, "bfloat16")


# All of them


def test_they_nest(make_source: Any, deferred: Any, weights: dict[str, torch.Tensor]) -> None:
    late = {name: deferred(tensor) for name, tensor in weights.items()}
    source = streamer.cast(
        streamer.rename(
            streamer.exclude(streamer.map_tensors(make_source(late), export), "*.mlp.*"),
            r"^model\.",
            "",
        ),
        torch.float16,
    )
    expected = {
        name.removeprefix("model."): tensor.half()
        for name, tensor in exported(weights).items()
        if ".mlp." not in name
    }
    assert same(collect(source), expected)
    assert same(collect(source), expected)  # replayed


def test_borrowed_memory_is_read_in_time(make_source: Any) -> None:
    """Case 18, through transforms: the source overwrites one buffer at each step."""
    buffer = torch.zeros(4)
    source = make_source(
        {"a": buffer, "b": buffer, "c": buffer}, on_step=lambda index: buffer.fill_(index + 1)
    )
    split = streamer.map_tensors(
        source,
        lambda spec: [
            (
                replace(spec, name=f"{spec.name}{part}", shape=(2,)),
                lambda tensor, at=at: tensor[at : at + 2],
            )
            for part, at in (("x", 0), ("y", 2))
        ],
    )
    found = collect(streamer.cast(split, BF16))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "ax": [1, 1], "ay": [1, 1], "bx": [2, 2], "by": [2, 2], "cx": [3, 3], "cy": [3, 3],
    }  # fmt: skip


def test_none_passes_the_version_on(make_source: Any) -> None:
    source = make_source({"a": torch.ones(1), "b": torch.ones(1)}, weight_version="commit")
    for other in (
        streamer.cast(source, BF16),
        streamer.rename(source, {"a": "c"}),
        streamer.select(source, "a"),
        streamer.exclude(source, "a"),
        streamer.map_tensors(source, lambda spec: None),
        streamer.cast(streamer.select(source, "a"), BF16),
    ):
        assert other.weight_version is None


def test_who_opens_closes(make_source: Any, tmp_path: Any, leaks: Callable[[], Any]) -> None:
    source = make_source({"a": torch.ones(1)})
    streamer.cast(streamer.rename(source, {"a": "b"}), BF16).close()
    assert source.closed == 0
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    before = leaks()
    opened = streamer.rename(tmp_path, {"a": "b"})
    assert leaks()["fds"] == before["fds"] + 1
    assert same(collect(opened), {"b": torch.ones(1)})
    opened.close()
    with pytest.raises(UsageError):
        streamer.rename(tmp_path, {"x": "b"})
    assert leaks()["fds"] == before["fds"]


def test_a_source_that_breaks_its_word_is_told_under_its_own_names(make_source: Any) -> None:
    declared = [TensorSpec("a", F32, (1,)), TensorSpec("b", F32, (1,))]
    for pairs, message in [
        ({"a": torch.ones(1)}, "source ended after 1 of 2 tensors"),
        ({"a": torch.ones(1), "x": torch.ones(1)}, "tensor 1: .* says b, the iterator gave x"),
        ({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, "the iterator gave c after"),
    ]:
        source = streamer.rename(make_source(pairs, declared), str.upper)
        with pytest.raises(SpecMismatch, match=message):
            collect(source)


@pytest.mark.parametrize("packed", [True, False])
def test_both_workers_hold_what_was_declared(
    server: Any, make_source: Any, deferred: Any, weights: dict[str, torch.Tensor], packed: bool
) -> None:
    """Case 17: a float32 model to a bfloat16 server; half of it is still in a file."""
    mixed = {
        name: deferred(tensor) if index % 2 else tensor
        for index, (name, tensor) in enumerate(weights.items())
    }
    source = streamer.cast(streamer.rename(make_source(mixed), "^", f"cast{packed}."), BF16)
    report = streamer.push(source, to=server.url, packed=packed, buffer_size=64)
    expected = {f"cast{packed}.{name}": value for name, value in cast_values(weights, BF16).items()}
    assert server.holds(expected)
    assert report.tensors == len(expected)
    assert report.bytes == sum(tensor.nbytes for tensor in expected.values())
    assert not server.holds({**expected, f"cast{packed}.model.ids": torch.arange(4) + 1})


# That these tests would notice


def test_a_cast_that_does_not_cast_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, make_source: Any, deferred: Any
) -> None:
    monkeypatch.setattr("streamer.transforms.cast_payload", lambda old, new, payload: payload)
    with pytest.raises(SpecMismatch, match=r"a bfloat16\[4\]"):
        collect(streamer.cast(make_source({"a": torch.randn(4)}), BF16))
    late = streamer.cast(make_source({"a": deferred(torch.randn(4))}), BF16)
    with pytest.raises(AssertionError):
        assert same(collect(late), {"a": torch.randn(4).to(BF16)})


def test_a_rule_that_changes_its_mind_would_be_noticed(make_source: Any) -> None:
    calls = iter(range(100))

    def moody(spec: TensorSpec) -> list[Output]:
        return [Output(replace(spec, name=f"{spec.name}{next(calls)}"))]

    with pytest.raises(SpecMismatch):
        collect(Transformed(make_source({"a": torch.ones(1)}), moody))


# The command line


@pytest.fixture
def checkpoint(tmp_path: Any, weights: dict[str, torch.Tensor]) -> Any:
    save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def test_plan_shows_what_would_be_sent(checkpoint: Any) -> None:
    result = run(
        "plan", checkpoint, "--json", "--tensors", "--select", "model.*", "--exclude", "*.mlp.*",
        "--exclude", "model.ids", "--rename", r"^model\.=m.", "--rename", r"(?<=m)\.(?=e)=_",
        "--cast", "bfloat16",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    listed = {item["name"]: item["dtype"] for item in json.loads(result.stdout)["tensor_list"]}
    assert listed == dict.fromkeys(
        ["m_embed.weight", "m.layers.0.qkv.weight", "m.layers.0.norm.weight", "m.layers.0.empty"],
        "bfloat16",
    )


def test_push_sends_it(
    server: Any, checkpoint: Any, weights: dict[str, torch.Tensor], leaks: Callable[[], Any]
) -> None:
    result = run("push", checkpoint, "--to", server.url, "--rename", "^=cli.", "--cast", "float16")
    assert result.exit_code == 0, result.stderr
    assert server.holds(
        {f"cli.{name}": value for name, value in cast_values(weights, torch.float16).items()}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rename", "model"], "--rename: 'model' is not OLD=NEW"),
        (["--rename", "=x"], "--rename: '=x' is not OLD=NEW"),
        (["--rename", "modle=x"], "rename: 'modle' is in none of the names"),
        (["--select", "x*"], "select: 'x*' matches none of the names"),
        (["--exclude", "x*"], "exclude: 'x*' matches none of the names"),
        (["--cast", "int8"], "'int8' is not one of"),
    ],
)
def test_wrong_usage_is_one_line(checkpoint: Any, arguments: list[str], message: str) -> None:
    result = run("plan", checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_source_passes_through(make_source: Any, source_error: Any) -> None:
    def fail(index: int) -> None:
        raise source_error("gone")

    with pytest.raises(SourceError, match=r"^gone$"):
        collect(streamer.cast(make_source({"a": torch.ones(1)}, on_step=fail), BF16))


def test_two_tensors_of_one_name_are_planned_never(make_source: Any) -> None:
    source = make_source([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(UsageError, match="a and a would both be called a"):
        make_plan(streamer.cast(source, BF16).specs())
