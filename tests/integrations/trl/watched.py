"""Run `examples/trl_grpo.py`, and write what server and trainer say after each push.

    watched.py OUTPUT.jsonl ARGUMENTS-OF-THE-EXAMPLE

Run by the Python of `.trl`. The trainer's model is not let generate: completions come from the
server, or from nowhere.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import GenerationMixin, TrainerCallback

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"
PROMPTS = ([1, 5, 9, 33, 7], [200, 100, 50], [3] * 12)
TOKENS = 12


def served(url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The likeliest tokens after ``prompt``, by the server, and their log-probabilities."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@torch.no_grad()
def own(model: Any, prompt: list[int], completion: list[int]) -> tuple[list[int], list[float]]:
    """The likeliest token at each place of ``completion``, and the log-probability of its own."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1)
    picked = found.gather(1, torch.tensor(completion)[:, None])
    return found.argmax(-1).tolist(), picked[:, 0].tolist()


class Watch(TrainerCallback):
    """Behind the callback that pushes."""

    def __init__(self, url: str, output: Path) -> None:
        self._url = url
        self._output = output

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._write(state.global_step, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._write(state.global_step, given["model"])

    def _write(self, step: int, model: Any) -> None:
        version = requests.get(f"{self._url}/weight_info", timeout=10).json()["weight_version"]
        entry: dict[str, Any] = {"step": step, "version": version, "server": [], "trainer": []}
        for prompt in PROMPTS:
            tokens, logprobs = served(self._url, prompt)
            entry["server"].append([tokens, logprobs])
            entry["trainer"].append(own(model, prompt, tokens))
        with self._output.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def refuse(*args: Any, **options: Any) -> None:
    raise AssertionError("the trainer's own model was asked for completions")


def main() -> None:
    output = Path(sys.argv.pop(1))
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    GenerationMixin.generate = refuse
    make_trainer = example.make_trainer

    def watched(arguments: Any) -> Any:
        trainer = make_trainer(arguments)
        trainer.add_callback(Watch(arguments.to, output))
        return trainer

    example.make_trainer = watched
    example.main()


if __name__ == "__main__":
    main()
