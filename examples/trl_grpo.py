"""Train with TRL's GRPO: completions come from a running vLLM, weights go into it after every step.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "streamer"}'
    python examples/trl_grpo.py --model MODEL --to http://localhost:8000

It needs `trl`, and no vLLM beside it: TRL's own server mode imports vLLM into the trainer, while
a `rollout_func` may get its completions from wherever it likes. With `--lora` an adapter is
trained, and the server gets the base weights with the adapter merged into them.
"""

from __future__ import annotations

import argparse
from typing import Any

import requests
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from streamer.integrations.transformers import StreamerCallback

PROMPTS = ["Once upon a time", "The sea is", "My name is", "To make bread,"]


class Rollouts:
    """Completions of the server at ``url``, as TRL's `rollout_func` returns them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        body = {
            "model": self.model,
            "prompt": prompt_ids,  # each one is there as often as it is to be completed
            "max_tokens": trainer.args.max_completion_length,
            "temperature": trainer.args.temperature,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }


def letters(completions: list[str], **_: Any) -> list[float]:
    """The reward: how much of a completion is letters."""
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


def make_trainer(arguments: argparse.Namespace) -> GRPOTrainer:
    return GRPOTrainer(
        arguments.model,
        reward_funcs=letters,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * arguments.steps}),
        rollout_func=Rollouts(arguments.to),
        peft_config=LoraConfig(target_modules="all-linear") if arguments.lora else None,
        args=GRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=32,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="what the server has been started with")
    parser.add_argument("--to", required=True, help="the server's URL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--output", default="trl_grpo")
    arguments = parser.parse_args()

    trainer = make_trainer(arguments)
    with StreamerCallback(arguments.to, at_start=True).attach(trainer) as streaming:
        trainer.train()
    for report in streaming.reports:
        print(f"{report.weight_version}: {report.tensors} tensors in {report.seconds.total:.3f} s")


if __name__ == "__main__":
    main()
