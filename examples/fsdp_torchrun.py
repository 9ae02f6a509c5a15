"""Train a sharded model, and push it into a running server after every step.

    streamer serve --port 8000    # in another terminal: wait for its line `ready: ...`
    torchrun --nproc-per-node 2 examples/fsdp_torchrun.py --to http://localhost:8000

It runs on CPUs over Gloo, and on GPUs over NCCL where there is one for each rank. With vLLM in
place of the reference server the model's names and shapes must be those of the checkpoint that it
serves.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import streamer


class Model(nn.Module):
    """Something with layers."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.lm_head = nn.Linear(width, 1000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.lm_head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Rank 0 sends. The others gather with it, and contact no server.
    with streamer.connect(arguments.to if rank == 0 else None) as session:
        for step in range(arguments.steps):
            tokens = torch.randint(0, 1000, (256,), device=device)
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = session.push(model, weight_version=f"step-{step}")
            if rank == 0:
                print(
                    f"{report.weight_version}: loss {loss.item():.3f}, {report.tensors} tensors, "
                    f"{report.bytes / 1e6:.1f} MB in {report.seconds.total:.3f} s",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
