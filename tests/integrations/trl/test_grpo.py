"""`examples/trl_grpo.py` with a real vLLM: what the server says follows the trainer's weights.

Slow: a minute, most of it until vLLM is up.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS = 3
WATCHED = Path(__file__).with_name("watched.py")
CLOSE = 1e-4
"""How far log-probabilities of the same weights may be apart, computed here and there."""


def train(python: Path, checkpoint: Path, url: str, folder: Path, *options: str) -> list[Any]:
    """What was seen at the start and after each step; the example must come to a good end."""
    seen = folder / "seen.jsonl"
    command = [python, WATCHED, seen, "--model", checkpoint, "--to", url, "--steps", str(STEPS)]
    command += ["--output", folder / "out", *options]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    pushed = [line.partition(":")[0] for line in done.stdout.splitlines() if "tensors in" in line]
    assert pushed == [f"step-{step}" for step in range(STEPS + 1)], done.stdout
    assert "streamer/gb_per_s" in done.stdout
    return [json.loads(line) for line in seen.read_text().splitlines()]


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "options",
    [["--learning-rate", "0.005"], ["--learning-rate", "0.05", "--lora"]],
    ids=["full", "lora"],
)
def test_grpo(
    vllm: Any, checkpoint: Path, trl_python: Path, tmp_path: Path, options: list[str]
) -> None:
    seen = train(trl_python, checkpoint, vllm.url, tmp_path, *options)
    assert [(entry["step"], entry["version"]) for entry in seen] == [
        (step, f"step-{step}") for step in range(STEPS + 1)
    ]
    for entry in seen:
        for (tokens, logprobs), (own_tokens, own_logprobs) in zip(
            entry["server"], entry["trainer"], strict=True
        ):
            assert tokens == own_tokens
            assert apart(logprobs, own_logprobs) < CLOSE
    # The prompts' first tokens: what comes behind them may be other tokens.
    firsts = [[logprobs[0] for _, logprobs in entry["server"]] for entry in seen]
    moves = [apart(before, after) for before, after in pairwise(firsts)]
    print("log-probabilities moved by", [round(move, 4) for move in moves])
    assert min(moves) > 100 * CLOSE
    assert not vllm.paused
