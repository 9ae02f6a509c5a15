"""Modules, state dicts, pairs and vLLM's own sources: what is sent, and what is refused."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer import SourceError, SpecMismatch, UsageError

Sent = Callable[..., dict[str, torch.Tensor]]
Same = Callable[..., bool]
Refused = Callable[..., str]


# Values


def test_nothing_is_copied(make_model: Any) -> None:
    model = make_model()
    for source in (model, model.state_dict()):
        opened = streamer.open_source(source)
        memory = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        assert {name: tensor.data_ptr() for name, tensor in opened} == memory
        assert all(type(tensor) is torch.Tensor for _, tensor in opened)
        assert not any(tensor.requires_grad for _, tensor in opened)


def test_an_open_source_sends_the_values_of_each_time(
    make_model: Any, sent: Sent, same: Same
) -> None:
    model = make_model()
    sources = [
        streamer.open_source(model),
        streamer.open_source(model.state_dict()),
        streamer.open_source(model.named_parameters),
    ]
    before = [sent(source) for source in sources]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for source, old in zip(sources, before, strict=True):
        new = sent(source)
        assert same(new, {name: model.state_dict()[name] for name in old})
        assert not torch.equal(new["embed.weight"], old["embed.weight"])


def test_exchanged_parameters_and_new_shapes_are_seen(
    make_model: Any, sent: Sent, same: Same
) -> None:
    model = make_model()
    source = streamer.open_source(model)
    stale = source.specs()
    model.embed = nn.Embedding(12, 4)
    model.half()
    assert same(sent(source), model.state_dict())
    with pytest.raises(SpecMismatch, match=r"says embed.weight float32\[10, 4\].*float16\[12, 4\]"):
        next(streamer.source.checked(source, stale))


# Tied weights


def test_tied_weights_go_out_under_every_name_or_the_first(
    make_model: Any, sent: Sent, same: Same
) -> None:
    """Case 30."""
    model = make_model(tied=True)
    assert same(sent(model), model.state_dict())
    assert same(sent(model.state_dict()), model.state_dict())
    first = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert same(sent(model, scheme="module", tied="first"), first)
    assert same(sent(model.state_dict(), scheme="module", tied="first"), first)
    assert {name for name, _ in model.named_parameters()} < first.keys()


def test_equal_or_overlapping_is_not_tied(sent: Sent, same: Same) -> None:
    """Never dropped when it could hold other values: only one view of one memory is the same."""
    base = torch.arange(6.0)
    complex_ = torch.randn(2, dtype=torch.complex64)
    state = {
        "a": base,
        "equal": base.clone(),
        "part": base[:3],
        "turned": base.view(2, 3).t(),
        "shaped": base.view(2, 3),
        "bits": base.view(torch.int32),
        "complex": complex_,
        "conjugate": complex_.conj(),
        "imaginary": complex_.imag,
        "negative": complex_.conj().imag,
        "none": torch.empty(0),
        "nothing": torch.empty(0),
        "again": base.view(6),
    }
    expected = {name: tensor for name, tensor in state.items() if name != "again"}
    assert same(sent(state, scheme="module", tied="first"), expected)


def test_a_layer_that_is_used_twice_has_two_names(sent: Sent, same: Same) -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert same(sent(model), model.state_dict())
    assert list(sent(model, scheme="module", tied="first")) == ["0.weight", "0.bias"]


# What cannot be sent


class Quantized(torch.Tensor):
    """A subclass, as of torchao: its memory is not its values."""


class Int8Params(nn.Parameter):
    """As of bitsandbytes."""


def test_what_is_no_plain_memory_is_named(make_model: Any, refused: Refused) -> None:
    """Case 34, and its like: at the opening, which is before HTTP."""

    def with_weight(weight: Any) -> nn.Module:
        model = make_model()
        model.layers[1].up.weight = weight
        return model

    name = "layers.1.up.weight"
    for model, message in [
        (with_weight(nn.Parameter(torch.empty(8, 4, device="meta"))), " is on the meta device"),
        (
            with_weight(nn.Parameter(torch.ones(8, 4).as_subclass(Quantized))),
            "Quantized of torch.fl",
        ),
        (with_weight(Int8Params(torch.ones(8, 4))), "Int8Params of torch.float32, whose memory is"),
        (with_weight(nn.UninitializedParameter()), " has no shape yet: call the module once"),
        (with_weight(nn.Parameter(torch.eye(4).to_sparse())), " has the layout torch.sparse_coo"),
    ]:
        text = refused(model)
        assert text.startswith(name)
        assert message in text
        state = {name: model.layers[1].up.weight}
        assert message in refused(state)
        assert message in refused(lambda state=state: iter(state.items()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_tensor_is_named(refused: Refused) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert refused({"q": tensor}) == (
        "q is of torch.qint8, whose memory is not its values: dequantize() it"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_layer_that_packs_its_weights_is_named(refused: Refused) -> None:
    """It has no parameter to be found: the others would go out without it."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    message = refused(quantized)
    assert message.startswith("1._packed_params is a torch.ao.nn.quantized.modules.linear.Linear")
    assert message.endswith("packs its weights: push the module that it was quantized from")


def test_what_zero_3_has_partitioned_is_refused(refused: Refused, sent: Sent, same: Same) -> None:
    """Its parameters are empty, and of another shape, until they are gathered."""
    model: Any = nn.Linear(3, 2)
    whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for index, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = index, parameter.shape
        parameter.data = torch.empty(0)
    for source in (model, model.state_dict(keep_vars=True), model.named_parameters):
        assert refused(source).startswith("weight is partitioned by DeepSpeed ZeRO-3: use ZeRO-2")
    for name, parameter in model.named_parameters():  # as inside of GatheredParameters
        parameter.data = whole[name]
    assert same(sent(model), whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchscript_is_refused(refused: Refused) -> None:
    module = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    message = "it is made by TorchScript, which hides its tensors: push its state_dict()"
    assert refused(module) == refused(nn.Sequential(module)) == message
    assert [spec.name for spec in streamer.open_source(module.state_dict()).specs()] == [
        "weight",
        "bias",
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_is_named(refused: Refused) -> None:
    """Its layout is strided, and it has no shape to be asked for."""
    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    message = "n is a nested tensor, of no one shape: yield its parts, from unbind()"
    assert refused({"n": parts}) == refused([("n", parts)]) == message


def test_meta_is_told_before_the_server_is_touched(server: Any, make_model: Any) -> None:
    model = make_model()
    model.norm.to("meta")
    with pytest.raises(SourceError, match=r"^norm.weight is on the meta device"):
        streamer.push(model, to=server.url)
    assert server.calls == []


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.lora_A.default.weight",
        "a.lora_embedding_B",
        "base_model.model.lm_head.weight",
        "layers.0.up.base_layer.weight",
        "base_layer.bias",
        "score.modules_to_save.default.weight",
        "score.original_module.weight",
    ],
)
def test_adapters_are_no_weights(refused: Refused, name: str) -> None:
    """Case 32, however they come."""
    state = {"w": torch.ones(1), name: torch.ones(1)}
    module = nn.Module()
    for path, tensor in state.items():
        *parents, last = path.split(".")
        owner = module
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner._modules[parent]  # type: ignore[assignment]
        owner.register_buffer(last, tensor)
    for source in (state, module, list(state.items()), Vllm33(state)):
        assert refused(source).startswith(f"{name} belongs to an adapter, which no server takes")
    for plain in ("explora_lora.w", "base_layer.0.weight", "my_base_layer.weight"):
        assert streamer.open_source({plain: torch.ones(1)}).specs()


# State dicts


def test_a_state_dict_of_a_wrapped_model_has_plain_names(
    make_model: Any, sent: Sent, same: Same
) -> None:
    state = make_model().state_dict()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    assert same(sent(wrapped), state)
    assert same(sent(wrapped, scheme="module", wrappers="keep"), wrapped)
    extra = {**state, "layers.0._extra_state": torch.ones(3)}
    assert same(sent(extra), state)


class Lazy(UserDict[str, torch.Tensor]):
    """Makes a tensor when it is asked for, in one memory for all."""

    buffer = torch.empty(2)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffer.copy_(self.data[name])


@pytest.mark.parametrize("packed", [True, False])
def test_a_mapping_may_make_its_tensors_in_one_memory(server: Any, packed: bool) -> None:
    state = {f"lazy.{packed}.{index}": torch.full((2,), float(index)) for index in range(6)}
    streamer.push(Lazy(state), to=server.url, packed=packed)
    assert server.holds(state)


def test_only_a_dict_is_trusted_to_hold_its_tensors() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    for mapping in (state, OrderedDict(state)):
        assert streamer.open_source(mapping, scheme="module", tied="first").lasting
    assert not streamer.open_source(Lazy(state)).lasting
    with pytest.raises(UsageError, match="a Lazy takes no option tied"):
        streamer.open_source(Lazy(state), scheme="module", tied="first")


def test_what_is_no_state_dict_is_told(refused: Refused) -> None:
    assert refused({"model": {"w": torch.ones(1)}}) == (
        "model is a builtins.dict, not a tensor: push what is in it, as checkpoint['model']"
    )
    assert refused({"w": torch.ones(1), "step": 1}) == (
        "step is a builtins.int, not a tensor: leave it out"
    )
    assert refused({1: torch.ones(1)}) == "a state dict has names for keys, not 1"
    assert refused({"x.a": torch.ones(1), "x._orig_mod.a": torch.ones(1)}).startswith(
        "x.a and x._orig_mod.a would both be called x.a"
    )


# Pairs


def generate(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields views of one buffer, which it overwrites."""
    buffer = torch.empty(64)
    for name, tensor in state.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view


class Iterable:
    """Gives a fresh iterator each time."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return generate(self.state)


def test_pairs_come_from_anything_that_can_be_read_again(sent: Sent, same: Same) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3, 1), "c": torch.tensor(5.0)}
    for pairs in (
        lambda: generate(state),
        functools.partial(generate, state),
        Iterable(state),
        list(state.items()),
        state.items(),
        state.copy,
    ):
        assert same(sent(pairs), state)
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    assert same(sent(wrapped.items()), state)


def test_a_factory_is_run_once_for_the_specs_and_once_a_sync(sent: Sent) -> None:
    runs = []

    def factory() -> Iterator[tuple[str, torch.Tensor]]:
        runs.append(1)
        yield "a", torch.ones(1)

    source = streamer.open_source(factory)
    assert len(runs) == 1
    sent(source)
    sent(source)
    assert len(runs) == 3


def fails() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(1)
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            generate({}),
            "a generator can be read only once, and a push reads it for the specs first: push the "
            "function that makes it, as in push(model.named_parameters)",
        ),
        (generate, "generate must be callable without arguments: missing a required argument"),
        (lambda: 3, "the factory returned a int, not pairs of name and tensor"),
        (lambda: [1], "item 0 is a int, not a pair of name and tensor: yield (name, tensor)"),
        (lambda: [("a", torch.ones(1), 3)], "item 0 is a tuple, not a pair"),
        (lambda: [("a", [1.0])], "a is a builtins.list, not a tensor: leave it out"),
        (fails, "the factory of pairs failed after a: RuntimeError: no more"),
        ("text", "the source module takes no str: from Python, push a module, a state dict"),
        (3, "the source module takes no int"),
    ],
)
def test_other_pairs_are_refused(refused: Refused, pairs: object, message: str) -> None:
    assert refused(pairs).startswith(message)


def test_only_what_this_source_can_open_is_claimed() -> None:
    for thing in (3, None, torch.ones(1), nn.Linear, b"bytes"):
        with pytest.raises(SourceError, match="no source accepts "):
            streamer.open_source(thing)
    with pytest.raises(SourceError, match="can be read only once"):
        streamer.open_source(nn.Linear(1, 1).named_parameters())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"a": torch.ones(1)}, {"tied": "none"}, "tied must be one of all, first, not 'none'"),
        ({"a": torch.ones(1)}, {"wrappers": "no"}, "wrappers must be one of strip, keep, not 'no'"),
        ([("a", torch.ones(1))], {"tied": "all"}, "a list takes no option tied"),
        ({"a": torch.ones(1)}, {"what": 1}, "does not take these options"),
    ],
)
def test_wrong_options_are_named(source: object, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        streamer.open_source(source, scheme="module", **options)


# vLLM's own sources


@dataclass(frozen=True)
class ParamMeta:
    """As of 0.33; that of 0.32 has the first three, and a placement if it is for shards."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[object, ...] | None = field(default=None, kw_only=True)


class Vllm32:
    """As sources are written for vLLM 0.32."""

    def __init__(
        self,
        state: dict[str, Any],
        held: set[str] | None = None,
        placements: tuple[object, ...] | None = None,
    ) -> None:
        self.state = state
        self.held = held
        self.placements = placements

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, value.dtype, value.shape, placements=self.placements)
            for name, value in self.state.items()
        ]

    def held_names(self) -> set[str] | None:
        return self.held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.state.items())


class Vllm33:
    """As sources are written for vLLM 0.33."""

    def __init__(self, state: dict[str, Any], owners: tuple[int, ...] | None = None) -> None:
        self.state = state
        self.owners = owners
        self.reads = 0

    @functools.cached_property
    def metadata(self) -> list[ParamMeta]:
        self.reads += 1
        return [
            ParamMeta(
                name,
                value.dtype,
                tuple(value.shape),
                owners=self.owners,
                placements=None if self.owners is None else ("Shard(dim=0)",),
            )
            for name, value in self.state.items()
        ]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not Vllm33Local.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state.items()


class Vllm33Local(Vllm33):
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


def test_sources_written_for_vllm_work_as_they_are(make_model: Any, sent: Sent, same: Same) -> None:
    state = make_model().state_dict()
    for source in (Vllm32(state), Vllm33(state), Vllm33(state, owners=(0, 1))):
        opened = streamer.open_source(source)
        assert same(sent(opened), state)
        assert same(sent(opened), state)
    assert source.reads == 1
    parameters = dict(make_model().named_parameters())
    assert not any(tensor.requires_grad for tensor in sent(Vllm33(parameters)).values())


def test_a_rank_that_does_not_hold_all_cannot_send_all(refused: Refused) -> None:
    state = {"a": torch.ones(1), "b": torch.ones(1)}
    for source in (Vllm32(state, held={"a"}), Vllm33(state, owners=(1, 2))):
        name = "b" if isinstance(source, Vllm32) else "a"
        assert refused(source).startswith(f"{name} is not held by rank 0, which sends")
    assert "needs iter_full()" in refused(Vllm33Local(state))
    pieces = Vllm32(state, placements=(0, -1))
    assert refused(pieces).startswith("a comes in pieces, one of each rank: push the module")


@pytest.mark.parametrize(
    "metadata", [[("a", torch.float32, (1,))], {"format": "pt"}, 3, [ParamMeta("a", 0, 1)]]
)
def test_other_metadata_is_told(refused: Refused, metadata: object) -> None:
    source: Any = Vllm33({"a": torch.ones(1)})
    source.metadata = metadata
    assert refused(source).startswith(
        "the metadata of a Vllm33 must be entries with name, dtype and shape, as vLLM's ParamMeta: "
    )


def test_a_vllm_source_that_breaks_its_word_is_told(sent: Sent) -> None:
    source = Vllm32({"a": torch.ones(1)})
    opened = streamer.open_source(source)
    specs = opened.specs()
    source.state = {"a": None}
    with pytest.raises(SourceError, match=r"a is a builtins\.NoneType, not a tensor"):
        list(streamer.source.checked(opened, specs))


# End to end


@pytest.mark.parametrize("packed", [True, False])
def test_both_workers_hold_the_model_after_each_step(
    server: Any, make_model: Any, packed: bool
) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(f"net{packed}", make_model(tied=True))

    model = Root()
    with streamer.connect(server.url, packed=packed, buffer_size=100) as session:
        report = session.push(model)
        assert report.tensors == len(model.state_dict())
        assert server.holds(dict(model.state_dict()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert not server.holds(dict(model.state_dict()))
        opened = streamer.open_source(model, scheme="module", tied="first")
        assert session.push(opened).tensors == report.tensors - 1
        first = {name: v for name, v in model.state_dict().items() if "lm_head" not in name}
        assert server.holds(first)
        assert not server.holds(dict(model.state_dict()))  # the untied server was left the old one


@pytest.mark.parametrize("packed", [True, False])
def test_both_workers_hold_what_others_bring(server: Any, packed: bool) -> None:
    state = {f"other{packed}.{name}": torch.randn(5) for name in "abc"}
    mixed = {"x": state[f"other{packed}.a"], "y": state[f"other{packed}.b"].flip(0)}
    with streamer.connect(server.url, packed=packed, buffer_size=24) as session:
        for source in (lambda: generate(state), Vllm32(state), Vllm33(state), state):
            assert session.push(source).tensors == 3
            assert server.holds(state)
            for tensor in state.values():
                tensor.mul_(-1.5)
        session.push(mixed)
        assert server.holds(mixed)


def test_a_copy_at_the_opening_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, make_model: Any, sent: Sent, same: Same
) -> None:
    """The tests above would not pass with a source that reads values when it is opened."""
    model = make_model()
    source = streamer.open_source(model)
    frozen = [found._replace(tensor=found.tensor.detach().clone()) for found in source.tensors()]
    monkeypatch.setattr(source, "look_up", lambda: frozen)
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert not same(sent(source), model.state_dict())


def test_two_plugins_never_claim_one_object(make_model: Any) -> None:
    from streamer.registry import default_registry

    things = [make_model(), {"a": torch.ones(1)}, list, lambda: [], Vllm33({})]
    for thing in things:
        claims = [
            entry.scheme
            for entry in default_registry().entries.values()
            if entry.accepts is not None and entry.accepts(thing)
        ]
        assert claims == ([] if thing is list else ["module"])
