"""What the snippets of docs/frameworks.md are run with: objects of the frameworks' shape.

    recipes.py HEADING URL RANK WORLD STORE      as one rank of a trainer

Runs the snippets under HEADING, then pushes twice as that framework would, and saves what must have
arrived beside STORE. A stand-in makes the calls of the framework's source, with its arguments in
its order; the file and the commit stand beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
import sys
import threading
import urllib.request
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
        # verl/workers/engine_workers.py 00d595ff, `update_weights`
        def get_per_tensor_param(self) -> Any:
            return ((name, _whole(p)) for name, p in model.named_parameters()), None

    worker = defined("verl").ActorWorker()
    worker.server_urls, worker.rank = [url], rank
    worker.actor = SimpleNamespace(engine=TrainingEngine())
    worker.init_model()

    # verl/checkpoint_engine/base.py 065ef9bf, `CheckpointEngineManager.update_weights`, step 5
    def update_weights(global_steps: int | None = None) -> None:
        asyncio.run(worker.update_weights(global_steps=global_steps, mode="nccl"))

    model.step()
    update_weights()
    model.step()
    update_weights(global_steps=7)
    if rank == 0:
        assert streamer.WeightSyncClient(url).get_weight_version() == "step-7"
    worker.session.close()
    return whole(model)


class AsyncLLM:
    """vllm/v1/engine/async_llm.py, as the vLLM of tests/interop has it: without a world size."""

    def __init__(self, client: streamer.WeightSyncClient) -> None:
        self._client = client
        parallel = SimpleNamespace(world_size_across_dp=client.get_world_size())
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await asyncio.to_thread(self._client.init_weight_transfer_engine, request.init_info)

    async def start_weight_update(self) -> None:
        await asyncio.to_thread(self._client.start_weight_update)

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self._client.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await asyncio.to_thread(self._client.finish_weight_update, weight_version)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        assert mode == "keep"
        await asyncio.to_thread(self._client.pause_generation, mode)

    async def resume_generation(self) -> None:
        await asyncio.to_thread(self._client.resume_generation)

    async def is_paused(self) -> bool:
        return await asyncio.to_thread(self._client.is_paused)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> None:
        await asyncio.to_thread(self._client.reset_prefix_cache, reset_running_requests)


class AsyncActor:
    """A handle of an async Ray actor: its methods run on a loop of its own, and are waited for."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                result = method(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

        return call


def openrlhf(url: str, rank: int) -> dict[str, torch.Tensor]:
    """First from DeepSpeed's ZeRO-3, which FSDP2 stands for, then from FSDP2 itself."""
    model = sharded()

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
    # openrlhf/trainer/ray/vllm_engine.py, the archive's text 57502588318: `self.llm`
    actor = recipe.RolloutRayActor()
    actor.llm = AsyncLLM(streamer.WeightSyncClient(url))
    # openrlhf/trainer/ray/ppo_actor.py 012aae8c: `ActorPPOTrainer.broadcast_to_vllm`
    deep = SimpleNamespace(zero_stage=3)
    fsdp2 = SimpleNamespace(dist_backend="fsdp2", zero_stage=0)
    for held, args in ((SimpleNamespace(module=Module()), deep), (model, fsdp2)):
        trainer = recipe.ActorPPOTrainer()
        trainer.strategy = SimpleNamespace(args=args)
        trainer.actor = SimpleNamespace(model=held)
        handle = AsyncActor(actor)
        trainer.vllm_engines = [handle]
        trainer.backend, trainer.device = "streamer", "cpu"
        trainer.connect()
        model.step()
        trainer.broadcast_to_vllm()
        trainer.session.close()
        handle.kill()
    return whole(model)


class SkyrlTrainerCapabilities:
    """skyrl/backends/skyrl_train/weight_sync/weight_senders.py 3deacde1."""

    skyrl_handles_prefix_cache_reset: bool = False
    skyrl_force_disable_expandable_segments: bool = False
    skyrl_empty_cache_after_send: bool = True


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

    recipe = defined("SkyRL", SkyrlTrainerCapabilities=SkyrlTrainerCapabilities)
    engine = recipe.StreamerTrainerEngine(Source(), [url], rank)
    client = streamer.WeightSyncClient(url)

    # What workers/worker.py does, as SkyRL's own test of it has it: test_prefix_cache_reset.py, the
    # archive's text 71059624083. `send_weights` is off the event loop, and has no arguments.
    async def broadcast_to_inference_engines() -> None:
        setter = getattr(engine, "skyrl_set_reset_prefix_cache", None)
        assert setter is None
        if not engine.skyrl_handles_prefix_cache_reset and rank == 0:
            client.reset_prefix_cache(reset_running_requests=True)
        assert engine.skyrl_force_disable_expandable_segments is False
        await asyncio.to_thread(engine.send_weights)
        assert engine.skyrl_empty_cache_after_send is True

    # workers/worker_dispatch.py 011820a0, `save_weights_for_sampler`, not colocated
    for _ in range(2):
        model.step()
        if rank == 0:
            client.pause_generation()
        dist.barrier()
        asyncio.run(broadcast_to_inference_engines())
        dist.barrier()
        if rank == 0:
            assert client.is_paused()
            client.resume_generation()

    # weight_sync/weight_senders.py 3deacde1, `teardown_engine`
    engine.shutdown()
    close = getattr(getattr(engine, "client", None), "close", None)
    assert close is None
    return whole(model)


class AdminClient:
    """As much of `httpx.AsyncClient` as `StaticInferencePool.admin_clients` are used for."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    async def get(self, path: str) -> Any:
        def answer() -> Any:
            with urllib.request.urlopen(self._base_url + path, timeout=10) as response:
                return json.load(response)

        said = await asyncio.to_thread(answer)
        return SimpleNamespace(json=lambda: said, raise_for_status=lambda: None)


class StaticInferencePool:
    """src/prime_rl/utils/client.py 005c286c."""

    def __init__(self, admin_clients: list[AdminClient]) -> None:
        self._admin_clients = admin_clients

    @property
    def admin_clients(self) -> list[AdminClient]:
        return self._admin_clients


# src/prime_rl/utils/pathing.py, as orchestrator/watcher.py 005c286c uses it
def get_broadcast_dir(output_dir: Path) -> Path:
    return output_dir / "broadcasts"


def get_step_path(path: Path, step: int) -> Path:
    return path / f"step_{step}"


class WeightWatcher:
    """src/prime_rl/orchestrator/watcher.py 005c286c, `apply_policy_update`."""

    def __init__(self, output_dir: Path, inference: Any) -> None:
        self.output_dir, self.inference = output_dir, inference
        self.lora_name: str | None = None
        self.told: list[int] = []

    async def apply_policy_update(self, next_step: int) -> None:
        weights_path = get_step_path(get_broadcast_dir(self.output_dir), next_step)
        stable_marker = weights_path / "STABLE"
        while not stable_marker.exists():
            await asyncio.sleep(0.05)
        await self.inference.update_weights(weights_path, lora_name=self.lora_name, step=next_step)
        self.told.append(next_step)  # notify_observers


def prime_rl(url: str, rank: int) -> dict[str, torch.Tensor]:
    model = sharded()
    recipe = defined(
        "prime-rl",
        StaticInferencePool=StaticInferencePool,
        get_broadcast_dir=get_broadcast_dir,
        get_step_path=get_step_path,
    )
    run_dir = Path(sys.argv[-1]).with_name("run")
    watcher = WeightWatcher(run_dir, recipe.StreamerInferencePool([AdminClient(url)]))

    async def orchestrate() -> None:
        await watcher.apply_policy_update(1)
        await watcher.apply_policy_update(2)
        await watcher.apply_policy_update(1)  # the servers are ahead
        watcher.inference.deadline = 0.5
        try:
            await watcher.inference.update_weights(run_dir, lora_name=None, step=3)
        except TimeoutError:
            watcher.told.append(-3)

    orchestrator = threading.Thread(target=lambda: asyncio.run(orchestrate()))
    if rank == 0:
        orchestrator.start()
    broadcast = recipe.StreamerWeightBroadcast(run_dir, [url], rank)
    for step in (1, 2):
        model.step()
        # src/prime_rl/trainer/rl/broadcast/nccl.py 02b49f93: `broadcast_weights(model, step)`
        broadcast.broadcast_weights(model, step)
    broadcast.session.close()
    if rank == 0:
        orchestrator.join(timeout=30)
        assert not orchestrator.is_alive()
        assert watcher.told == [1, 2, 1, -3]
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
