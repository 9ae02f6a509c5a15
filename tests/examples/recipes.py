"""What the snippets of docs/frameworks.md are run with: objects of the frameworks' shape.

    recipes.py HEADING URL RANK WORLD STORE      as one rank of a trainer

Runs the snippets under HEADING, then pushes twice as that framework would, and saves what must have
arrived beside STORE.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import streamer
from streamer.integrations.lockstep import Lockstep

DOC = Path(__file__).parents[2] / "docs" / "frameworks.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)


def snippets() -> dict[str, list[str]]:
    """The Python snippets of the page, by the heading above them."""
    text = DOC.read_text()
    found: dict[str, list[str]] = {}
    for fence in FENCE.finditer(text):
        assert fence[1] == "python", fence[0]
        heading = HEADING.findall(text[: fence.start()])[-1]
        found.setdefault(heading, []).append(fence[2])
    return found


def defined(heading: str, **names: Any) -> SimpleNamespace:
    """What the snippets under ``heading`` define."""
    names |= {"streamer": streamer, "torch": torch, "asyncio": asyncio, "Lockstep": Lockstep}
    for snippet in snippets()[heading]:
        exec(compile(snippet, f"{DOC.name}: {heading}", "exec"), names)
    return SimpleNamespace(**names)


class Model(nn.Module):
    """Three layers, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 1


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded parameters; a collective."""
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (full() if full else parameter).detach().clone()


def sharded() -> Model:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def verl(url: str, rank: int) -> dict[str, torch.Tensor]:
    model = sharded()

    class TrainingEngine:
        def get_per_tensor_param(self) -> Any:
            return ((name, _whole(p)) for name, p in model.named_parameters()), None

    worker = defined("verl").ActorWorker()
    worker.server_urls, worker.rank = [url], rank
    worker.actor = SimpleNamespace(engine=TrainingEngine())
    worker.init_model()
    for worker.step in range(2):
        model.step()
        asyncio.run(worker.update_weights())
    worker.session.close()
    return whole(model)


def openrlhf(url: str, rank: int) -> dict[str, torch.Tensor]:
    """The actor is around an engine that is the server; FSDP2 shards in the place of ZeRO-3."""
    model = sharded()
    client = streamer.WeightSyncClient(url)

    class LLM:
        def get_world_size(self) -> int:
            return client.get_world_size()

        def init_weight_transfer_engine(self, request: Any) -> None:
            client.init_weight_transfer_engine(request["init_info"])

        def start_weight_update(self) -> None:
            client.start_weight_update()

        def update_weights(self, request: Any) -> None:
            client.update_weights(request["update_info"])

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            client.finish_weight_update(weight_version)

        def reset_prefix_cache(self, reset_running_requests: bool) -> None:
            client.reset_prefix_cache(reset_running_requests)

    class Zero3:
        """A parameter that is whole only within the block."""

        def __init__(self, parameter: torch.Tensor) -> None:
            self._parameter = parameter
            self.dtype, self.ds_shape = parameter.dtype, parameter.shape
            self.shape = torch.Size([0])
            self.data: torch.Tensor = torch.empty(0)

    class Module:
        def named_parameters(self) -> Any:
            return [(name, Zero3(p)) for name, p in model.named_parameters()]

    @contextlib.contextmanager
    def gathered_parameters(parameters: list[Zero3], enabled: bool) -> Any:
        assert enabled
        for parameter in parameters:
            parameter.data = _whole(parameter._parameter)
        yield
        for parameter in parameters:
            parameter.data.fill_(float("nan"))  # freed, and used for something else

    deepspeed = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=gathered_parameters))
    recipe = defined("OpenRLHF", deepspeed=deepspeed)
    actor = recipe.LLMRayActor()
    actor.llm = LLM()
    trainer = recipe.ActorPPOTrainer()
    trainer.vllm_engines, trainer.backend, trainer.device = [actor], "streamer", "cpu"
    trainer.zero_stage = 3
    trainer.actor = SimpleNamespace(model=SimpleNamespace(module=Module()))
    trainer.connect()
    for _ in range(2):
        model.step()
        trainer._broadcast_to_vllm()
    trainer.session.close()
    return whole(model)


def skyrl(url: str, rank: int) -> dict[str, torch.Tensor]:
    model = sharded()

    class Source:
        """vLLM's ``WeightSource``, over a sharded model."""

        def metadata(self) -> list[Any]:
            return [
                SimpleNamespace(name=name, dtype=p.dtype, shape=p.shape)
                for name, p in model.named_parameters()
            ]

        def __iter__(self) -> Any:
            return ((name, _whole(p)) for name, p in model.named_parameters())

    engine = defined("SkyRL").StreamerTrainerEngine(Source(), [url], rank)
    dispatcher = streamer.WeightSyncClient(url)
    for _ in range(2):
        model.step()
        if rank == 0:
            dispatcher.pause_generation()
        dist.barrier()
        engine.send_weights()
        dist.barrier()
        if rank == 0:
            assert dispatcher.is_paused()
            dispatcher.resume_generation()
    engine.shutdown()
    return whole(model)


def prime_rl(url: str, rank: int) -> dict[str, torch.Tensor]:
    model = sharded()
    recipe = defined("prime-rl")
    broadcast = recipe.StreamerWeightBroadcast([url], rank)
    for step in range(2):
        model.step()
        broadcast.broadcast_weights(model, step)
    broadcast.session.close()
    if rank == 0:
        asyncio.run(recipe.InferenceAdmin(url, "key").on_new_version(1))
    return whole(model)


RECIPES = {"verl": verl, "OpenRLHF": openrlhf, "SkyRL": skyrl, "prime-rl": prime_rl}


def main(heading: str, url: str, rank: str, world: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    sent = RECIPES[heading](url, int(rank))
    if rank == "0":
        torch.save(sent, f"{store}.sent")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
