"""The scripts in examples/, each run as its docstring says.

Those that need more than the development environment are run elsewhere: fsdp_torchrun.py in
tests/plugins/fsdp, trl_grpo.py in tests/integrations.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"fsdp_torchrun.py", "trl_grpo.py"}
HERE = {
    "async_push.py",
    "custom_source.py",
    "from_hub.py",
    "many_servers.py",
    "training_loop.py",
}


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / script), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_script_is_run_somewhere() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == HERE | ELSEWHERE


def test_training_loop(server: Any) -> None:
    out = run("training_loop.py", "--to", server.url, "--steps", "3")
    found = re.findall(r"step-(\d): loss ([\d.]+), 4 tensors in [\d.]+ ms", out)
    assert [step for step, _ in found] == ["0", "1", "2"], out
    assert float(found[0][1]) > float(found[2][1])
    assert server.weight_version == "step-2"


def test_many_servers(server: Any, other_server: Any, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    out = run("many_servers.py", str(tmp_path), "--to", server.url, other_server.url)
    assert f"{server.url}: 2 workers, arrival proven by digest" in out
    assert f"{other_server.url}: 1 workers, arrival proven by digest" in out
    assert server.holds(tensors)
    assert other_server.holds(tensors)


def test_custom_source(server: Any, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5)}
    for name, tensor in tensors.items():
        np.save(tmp_path / f"{name}.npy", tensor.numpy())
    out = run("custom_source.py", str(tmp_path), "--to", server.url)
    assert out.startswith("2 tensors, 64 bytes, now streamer-")
    assert server.holds(tensors)


def test_async_push(server: Any) -> None:
    out = run("async_push.py", "--to", server.url, "--steps", "3")
    found = re.findall(r"step-(\d) in [\d.]+ s, (\d+) turns of the event loop meanwhile", out)
    assert [step for step, _ in found] == ["0", "1", "2"], out
    assert all(int(turns) > 0 for _, turns in found)
    assert server.weight_version == "step-2"


def test_async_push_that_is_given_up(server: Any) -> None:
    server.fail("/start_weight_update", 0, delay=2)
    out = run("async_push.py", "--to", server.url, "--steps", "2", "--patience", "1")
    assert "step-0 was given up: the push was cancelled" in out
    assert "step-1 in " in out
    assert server.weight_version == "step-1"
    assert not server.paused


@pytest.fixture
def fake_hub() -> Any:
    """The Hub of the tests of that plugin."""
    path = ROOT / "tests" / "plugins" / "huggingface" / "fake_hub.py"
    spec = importlib.util.spec_from_file_location("fake_hub_of_examples", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    hub = module.FakeHub()
    model = module.build_model()
    commit = hub.repos.setdefault("org/name", module.Repo()).commit(model.files)
    yield hub, commit, model
    hub.stop()


@pytest.mark.parametrize("arguments", [(), ("--no-cache",)], ids=["cache", "no cache"])
def test_from_hub(server: Any, fake_hub: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    hub, commit, model = fake_hub
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "HF_TOKEN": ""}
    out = run("from_hub.py", "org/name", "--to", server.url, *arguments, **environment)
    assert out == f"{len(model.raw)} tensors sent: the server serves commit {commit}\n"
    assert server.weight_version == commit
    server.heal()
    out = run("from_hub.py", "org/name", "--to", server.url, *arguments, **environment)
    assert out == f"the server serves commit {commit} already\n"
    assert "POST /update_weights" not in server.calls
