"""The callback in trainings of two processes, on CPUs: every rank has it, and rank 0 sends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("rank.py")


def run(kind: str, url: str, model: Any, folder: Path) -> list[dict[str, Any]]:
    """What each rank ends with."""
    model.save_pretrained(folder / "model")
    # Without an address torchrun looks up this host's full name, and waits for a name server.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=localhost", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, str(SCRIPT), kind, url, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        out, _ = process.communicate(timeout=180)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()  # ranks are in groups of their own, and may hold the other end
        raise
    assert process.returncode == 0, out[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("kind", "wrapped"),
    [
        ("ddp", "DistributedDataParallel"),
        ("peft", "DistributedDataParallel"),
        ("fsdp", "FSDPQwen3ForCausalLM"),
    ],
)
def test_ranks(server: Any, model: Any, tmp_path: Path, kind: str, wrapped: str) -> None:
    steps = ["step-1", "step-2", "step-3"]
    expected = {"versions": steps, "wrapped": wrapped, "error": ""}
    assert run(kind, server.url, model, tmp_path) == [expected] * 2
    assert server.calls.count("POST /start_weight_update") == 3
    assert server.weight_version == "step-3"
    assert server.holds(torch.load(tmp_path / "weights.pt"))


def test_sender_fails(server: Any, model: Any, tmp_path: Path) -> None:
    server.fail("/start_weight_update")
    first, second = run("ddp", server.url, model, tmp_path)
    assert (first["error"], second["error"]) == ("ServerRefused", "RankError")
    assert first["versions"] == second["versions"] == []
    assert not server.paused
