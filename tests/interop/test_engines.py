"""vLLM's engines as objects, in the process of the trainer, and vLLM's trainer with our client.

See engines.py and trainer_engine.py for what is done.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("engines.py")
PYTHON = Path(__file__).parents[2] / ".vllm/bin/python"
_SPEC = importlib.util.spec_from_file_location("engines", SCRIPT)
engines = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(engines)


def run(kind, workers, checkpoints):
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0"] * workers),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [PYTHON, SCRIPT, kind, str(workers), checkpoints["a"], checkpoints["b"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.fixture
def disk(from_disk):
    return {name: [list(answer) for answer in facts.token_ids] for name, facts in from_disk.items()}


@pytest.mark.parametrize("workers", [1], indirect=True, ids=["one-worker"])
def test_async_llm(checkpoints, disk, workers):
    """It is paused while it is pushed to, and answers what was asked meanwhile with the new."""
    found = run("AsyncLLM", workers, checkpoints)
    engines.check(found, disk, workers)
    assert found["is_paused"]
    # Asked during the pushes of a, of half of b, and of b.
    assert found["meanwhile"] == [disk["a"], disk["b"], disk["b"]]


@pytest.mark.parametrize("workers", [2], indirect=True, ids=["two-workers"])
def test_llm(checkpoints, disk, workers):
    """It cannot be paused, and the error says what follows from that."""
    found = run("LLM", workers, checkpoints)
    engines.check(found, disk, workers)
    assert found["server"][0] == "LLM"
    assert found["torn"].endswith("cannot be paused: push again before it generates anything")


@pytest.mark.parametrize("workers", [1], indirect=True, ids=["one-worker"])
def test_vllm_s_own_trainer_sends_through_our_client(server, checkpoints, from_disk, workers):
    command = [PYTHON, SCRIPT.with_name("trainer_engine.py"), server.url, checkpoints["b"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert server.weight_version == "trainer-1"
    assert not server.paused
    assert server.facts() == from_disk["b"]
