"""Train a model, and push it into a running server after every step.

    streamer serve --port 8000    # in another terminal: wait for its line `ready: ...`
    python examples/training_loop.py --to http://localhost:8000

With vLLM in place of the reference server the model's names and shapes must be those of the
checkpoint that it serves.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import streamer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64)

    # Connected once: each push then costs a few milliseconds, and the bytes.
    with streamer.connect(arguments.to) as session:
        for step in range(arguments.steps):
            loss = nn.functional.mse_loss(model(inputs), inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = session.push(model, weight_version=f"step-{step}")
            print(
                f"{report.weight_version}: loss {loss.item():.4f}, {report.tensors} tensors "
                f"in {report.seconds.total * 1e3:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
