"""One rank of two that push a `Lockstep` three times: lockstep_rank.py URL RANK STORE [RANK].

With the last RANK, that one gives the second push up in the middle. Saves how each push has ended.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import streamer
from streamer.integrations.lockstep import Lockstep


def main(url: str, rank: str, store: str, gives_up: str = "") -> None:
    faulthandler.dump_traceback_later(50, exit=True)  # a rank that hangs says where, and ends
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    shards = [torch.full((500,), float(10 * index + int(rank))) for index in range(12)]
    passes = 0

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        whole = [torch.empty(500), torch.empty(500)]  # used again for every tensor
        for index, shard in enumerate(shards):
            dist.all_gather(whole, shard)
            if gives_up:
                time.sleep(0.05)
            yield f"t{index}", torch.cat(whole)

    ended: list[str] = []
    source = Lockstep(pairs)

    async def push_all() -> None:
        to = url if rank == "0" else None
        async with streamer.aconnect(to, buffer_size=5000, num_buffers=1) as session:
            for push in range(3):
                for shard in shards:
                    shard += 100
                patience = 0.3 if push == 1 and gives_up == rank else None
                try:
                    async with asyncio.timeout(patience):
                        report = await session.apush(source, weight_version=f"push-{push}")
                    ended.append(report.weight_version)
                except (streamer.StreamerError, TimeoutError) as error:
                    ended.append(f"{type(error).__name__}: {error}")

    asyncio.run(push_all())
    Path(f"{store}.{rank}").write_text(json.dumps([ended, passes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
