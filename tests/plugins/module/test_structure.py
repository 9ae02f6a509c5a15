"""Names and order of a module's tensors: wrappers, and what belongs to other sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streamer_module.structure import walk, without_wrappers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import streamer
from streamer import SourceError

compiled: Callable[[nn.Module], nn.Module] = torch.compile  # type: ignore[assignment]
Sent = Callable[..., dict[str, torch.Tensor]]
Same = Callable[..., bool]


def test_the_order_and_names_are_those_of_the_state_dict(
    make_model: Any, sent: Sent, same: Same
) -> None:
    """Case 33: persistent buffers go, others do not; a layer's tensors are near each other."""
    model = make_model()
    found = sent(model)
    assert same(found, model.state_dict())
    assert "layers.1.steps" in found
    assert "layers.1.cache" not in found
    assert found["layers.0.steps"].shape == ()
    layers = [name.split(".")[1] for name in found if name.startswith("layers.")]
    assert layers == sorted(layers)


TREES = st.recursive(
    st.just({}),
    lambda inner: st.dictionaries(
        st.sampled_from(["a", "module", "_orig_mod", "w"]), inner, max_size=3
    ),
    max_leaves=8,
)


@given(tree=TREES)
def test_any_tree_is_walked_like_its_state_dict(tree: dict[str, Any]) -> None:
    """Names that only look like a wrapper's stay, whatever the tree."""

    def build(node: dict[str, Any]) -> nn.Module:
        module = nn.Module()
        module.register_parameter("p", nn.Parameter(torch.ones(1)))
        module.register_buffer("b", torch.ones(1))
        module.register_buffer("n", torch.ones(1), persistent=False)
        for name, child in node.items():
            module.add_module(name, build(child))
        return module

    module = build(tree)
    places = list(walk(module))
    assert [place.path for place in places] == list(module.state_dict())
    assert [place.name for place in places] == [place.path for place in places]


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports its compiler
def test_wrappers_add_nothing_at_any_level(make_model: Any, sent: Sent, same: Same) -> None:
    """Case 31, nested. What is really called ``module`` keeps its name."""
    model = make_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "module.module" in expected
    assert "module.weight" in expected
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[0]._checkpoint_wrapped_module.up = compiled(
        offload_wrapper(model.layers[0]._checkpoint_wrapped_module.up)
    )
    model.module = nn.DataParallel(checkpoint_wrapper(model.module))
    wrapped = compiled(DistributedDataParallel(compiled(model)))
    paths = [place.path for place in walk(wrapped)]
    assert "_orig_mod.module._orig_mod.module.module._checkpoint_wrapped_module.module" in paths
    assert (
        "_orig_mod.module._orig_mod.layers.0._checkpoint_wrapped_module.up._orig_mod."
        "_checkpoint_wrapped_module.weight" in paths
    )
    assert same(sent(wrapped), expected)
    kept = streamer.open_source(wrapped, wrappers="keep")
    assert [spec.name for spec in kept.specs()] == paths


def test_a_collision_names_both(refused: Callable[..., str]) -> None:
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    wrapped._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    model = nn.ModuleDict({"a": wrapped})
    assert refused(model).startswith(
        "a.weight and a._checkpoint_wrapped_module.weight would both be called a.weight, without "
        "what wrappers add"
    )
    assert len(streamer.open_source(model, wrappers="keep").specs()) == 3


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.b"], ["module.a", "b"]),
        (
            ["x._checkpoint_wrapped_module.w", "x._fsdp_wrapped_module.module.w"],
            ["x.w", "x.module.w"],
        ),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        (["a._orig_mod"], ["a._orig_mod"]),
        (["a", "module.b"], ["a", "module.b"]),
        ([], []),
    ],
)
def test_names_alone_are_stripped_with_care(paths: list[str], names: list[str]) -> None:
    assert without_wrappers(paths) == names


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_sharded_modules_are_for_fsdp(make_model: Any, refused: Callable[..., str]) -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(make_model(), mesh=mesh)
    whole = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    originals = nn.Sequential(
        FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
        )
    )
    for model in (sharded, whole, originals):
        assert refused(model) == (
            "it is sharded over ranks: the source fsdp gathers it (scheme='fsdp')"
        )
        _is_not_claimed(model)
    state = {"a": torch.ones(1), "b": distribute_tensor(torch.ones(2), mesh, [Replicate()])}
    assert refused(state).startswith("b is sharded over ranks (torch.distributed.tensor.DTensor)")
    assert refused(lambda: iter(state.items())).startswith("b is sharded over ranks")
    _is_not_claimed(state)


def _is_not_claimed(source: object) -> None:
    """By this source, whoever else may claim it by now."""
    from streamer_module import accepts

    assert not accepts(source)


def test_what_is_empty_is_told(refused: Callable[..., str]) -> None:
    for source in (nn.Identity(), {}):
        assert "nothing to send" in refused(source)


def test_a_tree_with_a_wrong_walk_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, make_model: Any, sent: Sent, same: Same
) -> None:
    """These tests compare what they should: stripping by name alone does not pass them."""
    model = make_model()
    expected = dict(model.state_dict())
    monkeypatch.setattr(
        "streamer_module.structure._wrapped",
        lambda module: "module" if "module" in module._modules else None,
    )
    with pytest.raises((SourceError, AssertionError)):
        assert same(sent(model), expected)
