"""docs/frameworks.md: every snippet is run, the recipes on two ranks with objects of that shape."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import streamer
from streamer.testing.engine import LocalEngine

SCRIPT = Path(__file__).with_name("recipes.py")
_SPEC = importlib.util.spec_from_file_location("recipes", SCRIPT)
recipes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(recipes)

WEIGHTS = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
TESTED_HERE = {
    "Engines in place of URLs",
    "Our client in place of vLLM's",
    "Ray",
    "asyncio",
}


def test_every_snippet_is_run():
    assert set(recipes.snippets()) == TESTED_HERE | set(recipes.RECIPES)


@pytest.mark.parametrize("heading", recipes.RECIPES)
def test_recipe(server, tmp_path, heading):
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, heading, server.url, str(rank), "2", tmp_path / "store"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-4000:]
    assert server.holds(torch.load(tmp_path / "store.sent"))
    assert server.calls.count("POST /update_weights") == 2
    assert not server.paused


def run(heading, number, **names):
    names |= {"streamer": streamer, "weights": WEIGHTS}
    exec(recipes.snippets()[heading][number], names)


def test_engines(server):
    made = []

    def llm(model, **options):
        assert options["weight_transfer_config"] == {"backend": "streamer"}
        made.append(LocalEngine())
        return made[-1]

    run("Engines in place of URLs", 0, LLM=llm, model="model")
    assert made[0].get_weight_version() == "step-1"
    assert len(made[0].checksums()[0]) == len(WEIGHTS)
    made[0].close()
    run("Engines in place of URLs", 1, client=streamer.WeightSyncClient(server.url))
    assert server.holds(WEIGHTS)


def test_our_client(server):
    """What vLLM's trainer engine does with it is in tests/interop."""
    called = []

    class Trainer:
        @classmethod
        def trainer_init(cls, init_info, client, source):
            called.append(client.get_world_size())
            return cls()

        def send_weights(self):
            called.append("sent")

    names = {"url": server.url, "token": "t0ken", "init_info": None, "source": None}
    run("Our client in place of vLLM's", 0, NCCLTrainerWeightTransferEngine=Trainer, **names)
    assert called == [2, "sent"]


def test_ray():
    """With real actors: tests/ray. Here the handles are engines, and `ray` only takes options."""
    actors = [LocalEngine(), LocalEngine(2)]
    run("Ray", 0, actors=actors)
    assert [actor.get_weight_version() for actor in actors] == ["step-1"] * 2
    given = {}

    class Remote:
        def options(self, **options):
            given.update(options)
            return SimpleNamespace(remote=lambda model: model)

    fake = SimpleNamespace(remote=lambda **resources: lambda kind: Remote())
    run("Ray", 1, ray=fake, Rollout=None, model="model")
    assert given == {"runtime_env": {"env_vars": {"NCCL_SOCKET_IFNAME": "eth0"}}}
    for actor in actors:
        actor.close()


def test_asyncio(server):
    lines = recipes.snippets()["asyncio"][0].splitlines()
    names = {"streamer": streamer, "weights": WEIGHTS, "url": server.url}
    exec("async def main():\n" + "\n".join(f"    {line}" for line in lines), names)
    asyncio.run(names["main"]())
    assert server.holds(WEIGHTS)
    assert server.weight_version == "step-1"
