"""A real vLLM server on the CPU, and a checkpoint that a trainer and it can both load."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TRL = ROOT / ".trl/bin/python"
INTEROP = ROOT / "tests" / "interop" / "conftest.py"


def _interop() -> Any:
    """The module that knows how to start vLLM. pytest imports test modules by their paths."""
    name = "interop_of_integrations"
    spec = importlib.util.spec_from_file_location(name, INTEROP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """The Python that has TRL."""
    if not TRL.exists():
        pytest.fail(f"there is no {TRL}: run `make trl` (1 minute)")
    return TRL


@pytest.fixture(scope="session")
def checkpoint(trl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 in float32, where servers and trainers agree to many digits."""
    folder = tmp_path_factory.mktemp("checkpoint")
    maker = Path(__file__).with_name("make_model.py")
    subprocess.run([trl_python, maker, folder], check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def vllm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with the checkpoint's shapes and vLLM's dummy weights."""
    interop = _interop()
    if not (interop.VLLM / "bin/vllm").exists():
        pytest.fail(f"there is no vLLM in {interop.VLLM}: run `make vllm` (2 minutes)")
    server = interop.Server.launch(
        checkpoint,
        workers=1,
        load_format="dummy",
        log=tmp_path_factory.mktemp("vllm") / "log",
        options=["--dtype", "float32"],
    )
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()
