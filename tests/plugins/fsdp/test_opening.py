"""Which objects the source claims, and what it refuses: before anything is gathered or sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import streamer_fsdp
import streamer_module
import streamer_peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import streamer
from streamer import SourceError, UsageError
from streamer.source import checked

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # of FSDP1
]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def adapted() -> nn.Module:
    return peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["up"]))


def cases() -> dict[str, tuple[object, str | None]]:
    """Objects, and the one source that claims each."""
    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(Model(), mesh=mesh)
    gathered = fully_shard(Model(), mesh=mesh)
    gathered.unshard()
    assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in gathered.parameters())
    parallel = Model()
    parallel.up.weight = nn.Parameter(distribute_tensor(parallel.up.weight, mesh, [Shard(0)]))
    flat = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
    inside = nn.Sequential(
        FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    )
    return {
        "plain": (Model(), "module"),
        "state dict": (Model().state_dict(), "module"),
        "adapted": (adapted(), "peft"),
        "sharded": (sharded, "fsdp"),
        "sharded state dict": (sharded.state_dict(), "fsdp"),
        "gathered by hand": (gathered, "fsdp"),
        "tensor parallel": (parallel, "fsdp"),
        "flat": (flat, "fsdp"),
        "flat inside": (inside, "fsdp"),
        "sharded and adapted": (fully_shard(adapted(), mesh=mesh), "fsdp"),
        "a function": (Model().named_parameters, "module"),
        "a number": (3, None),
    }


def test_claims_are_disjoint() -> None:
    for name, (source, owner) in cases().items():
        claims = [
            plugin
            for plugin, accepts in (
                ("module", streamer_module.accepts),
                ("peft", streamer_peft.accepts),
                ("fsdp", streamer_fsdp.accepts),
            )
            if accepts(source)
        ]
        assert claims == ([owner] if owner else []), name


def test_one_rank_alone_is_enough() -> None:
    """A trainer of one rank needs no others, and no store."""
    for name, (source, owner) in cases().items():
        if owner == "fsdp" and name != "sharded and adapted":
            opened = streamer.open_source(source)
            assert opened.ranks is not None
            assert opened.ranks.sends
            specs = opened.specs()
            sent = {
                spec.name: tensor.clone()
                for spec, tensor in zip(specs, checked(opened, specs), strict=True)
            }
            prefix = "0." if name == "flat inside" else ""
            assert list(sent) == [prefix + key for key in Model().state_dict()], name


def test_an_iterator_that_is_closed_early_leaves_the_model_as_it_was() -> None:
    for name in ("sharded", "flat", "gathered by hand"):
        model = cases()[name][0]
        assert isinstance(model, nn.Module)
        before = model(torch.ones(2, 4))
        pairs = iter(streamer.open_source(model))
        next(pairs)
        pairs.close()  # type: ignore[attr-defined]
        assert torch.equal(model(torch.ones(2, 4)), before)


def refused(source: object, **options: Any) -> str:
    with pytest.raises((SourceError, UsageError)) as caught:
        streamer.open_source(source, scheme="fsdp", **options)
    text = str(caught.value)
    assert text.isprintable()
    return text


def test_what_is_refused() -> None:
    """Cases 32 and 34, and options."""
    mesh = init_device_mesh("cpu", (1,))
    assert refused(fully_shard(adapted(), mesh=mesh)).startswith(
        "it is a PEFT model that is sharded"
    )
    with torch.device("meta"):
        meta = fully_shard(Model(), mesh=mesh)
    assert refused(meta).startswith("up.weight is on the meta device, without values")
    state = {"a": distribute_tensor(torch.ones(2), mesh, [Replicate()])}
    assert refused({"base_model.model.a": state["a"]}).startswith("base_model.model.a belongs to")
    assert (
        refused({**state, "module.a": 3})
        == "module.a is a builtins.int, not a tensor: leave it out"
    )
    collision = {"x._orig_mod.a": state["a"], "x.a": state["a"]}
    assert refused(collision).startswith("x._orig_mod.a and x.a would both be called x.a")
    assert len(streamer.open_source(collision, scheme="fsdp", wrappers="keep").specs()) == 2
    assert refused(nn.Module()).startswith("it has no parameters or persistent buffers")
    assert refused("a path").startswith("the source fsdp takes no str: push the module")
    assert refused(state, tied="last") == "tied must be one of all, first, not 'last'"
    assert refused(state, wrappers="no") == "wrappers must be one of strip, keep, not 'no'"


def test_a_session_without_a_server_needs_ranks() -> None:
    with (
        streamer.connect(None) as session,
        pytest.raises(UsageError, match=r"^this process sends, and needs a server: give its URL"),
    ):
        session.push(Model())
    with pytest.raises(UsageError, match="at least one server"):
        streamer.connect([])


def test_nothing_is_imported_before_a_sharded_object_is_opened() -> None:
    code = (
        "import sys, streamer; streamer.open_source({'a': __import__('torch').ones(1)}); "
        "assert 'streamer_fsdp' in sys.modules; "
        "assert 'torch.distributed.fsdp' not in sys.modules; "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
