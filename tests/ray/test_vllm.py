"""A real vLLM in a Ray actor; see tests/interop/engines.py for what is done with it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTEROP = Path(__file__).parents[1] / "interop"
_SPEC = importlib.util.spec_from_file_location("engines", INTEROP / "engines.py")
engines = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(engines)

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, INTEROP / script, *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def found_by(kind, *folders):
    out = run("engines.py", kind, 1, *folders)
    (line,) = [line for line in out.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.timeout(600)
def test_a_vllm_in_an_actor(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    run("make_checkpoint.py", *[f"{folder}:{seed}" for seed, folder in enumerate(folders)])
    found = found_by("RayLLM", *folders)
    engines.check(found, found_by("Disk", *folders), 1)
    assert found["server"][0].startswith("Actor(")
