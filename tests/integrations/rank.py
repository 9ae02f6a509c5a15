"""One rank of a training under torchrun: rank.py KIND URL FOLDER. What it ends with goes to FOLDER.

KIND: ``ddp``, ``peft`` (under DDP), or ``fsdp`` (FSDP2, as Transformers itself shards a model).
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments

from streamer import StreamerError
from streamer.integrations.transformers import StreamerCallback


def load(kind: str, folder: Path) -> Any:
    if kind != "fsdp":
        model = Qwen3ForCausalLM.from_pretrained(folder / "model")
        config = peft.LoraConfig(target_modules="all-linear")
        return peft.get_peft_model(model, config) if kind == "peft" else model
    from transformers.distributed import DistributedConfig

    return Qwen3ForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(fsdp_size=2)
    )


def whole(model: Any) -> dict[str, torch.Tensor]:
    state = (model.merge_and_unload() if hasattr(model, "peft_config") else model).state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def main() -> None:
    kind, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    faulthandler.dump_traceback_later(150, exit=True)  # a rank that hangs says where, and ends
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of adapters
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = load(kind, folder)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 96, (16, 8), generator=generator)
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )
    error = ""
    with StreamerCallback(url if rank == 0 else None).attach(trainer) as callback:
        try:
            trainer.train()
        except StreamerError as raised:
            error = type(raised).__name__
    outcome = {
        "versions": [report.weight_version for report in callback.reports],
        "wrapped": type(trainer.model_wrapped).__name__,
        "error": error,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(outcome))
    weights = whole(trainer.model)  # a collective, where it is sharded
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    # To free a DDP model joins Gloo's threads with Python's lock held, which the last of them may
    # wait for, to free what the Trainer has gathered: all of it is through before.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
