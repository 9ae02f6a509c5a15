"""Train and push from asyncio: requests go on beside it, and a push may be given up in time.

    streamer serve --port 8000    # in another terminal: wait for its line `ready: ...`
    python examples/async_push.py --to http://localhost:8000

The push runs on a thread; the event loop is free all the while. A push that is cancelled, or that
`asyncio.timeout` ends, cleans up behind it first: no server is left stuck, and the next one works.
"""

from __future__ import annotations

import argparse
import asyncio

import torch

import streamer


async def roll_out(stop: asyncio.Event) -> int:
    """What else the loop does: stands for requests to the server."""
    turns = 0
    while not stop.is_set():
        await asyncio.sleep(0.001)
        turns += 1
    return turns


async def train(to: str, steps: int, patience: float) -> None:
    model = torch.nn.Linear(1024, 1024)
    async with streamer.aconnect(to) as session:
        for step in range(steps):
            with torch.no_grad():
                model.weight += 1  # stands for an optimizer's step
            stop = asyncio.Event()
            requests = asyncio.create_task(roll_out(stop))
            try:
                async with asyncio.timeout(patience):
                    report = await session.apush(model, weight_version=f"step-{step}")
            except TimeoutError as error:
                print(f"step-{step} was given up: {error.__cause__.__notes__[0]}")  # type: ignore[union-attr]
            else:
                print(f"{report.weight_version} in {report.seconds.total:.3f} s", end=", ")
            finally:
                stop.set()
            print(f"{await requests} turns of the event loop meanwhile", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a push")
    arguments = parser.parse_args()
    asyncio.run(train(arguments.to, arguments.steps, arguments.patience))


if __name__ == "__main__":
    main()
