"""The trainer's device memory over 20 syncs, and what is allowed: memory.py CHECKPOINT

Tensors of that checkpoint's names, dtypes and shapes, on the GPU and from disk, go to a reference
server that discards them. Prints what this process holds on the device beside its tensors, as the
driver counts it, after each sync. Exits with 1 if it is more than ``num_buffers`` times the buffer
and the largest tensor, and 64 MiB, or if it still grows at the end. Where the driver does not tell
processes apart, the server on the same device is counted as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from gpu_limits import start_server  # benchmarks/

import streamer
from streamer.defaults import DEFAULT_BUFFER_SIZE, DEFAULT_NUM_BUFFERS, MIB

SYNCS = 20


def held() -> int:
    """MiB of the device that the driver counts for this process."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    of = {int(pid): int(used) for pid, used in (line.split(",") for line in lines)}
    if os.getpid() in of:
        return of[os.getpid()]
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def syncs(what: str, url: str, source: Any, allowed: float) -> bool:
    torch.cuda.synchronize()
    before, torch_before = held(), torch.cuda.memory_reserved()
    with streamer.connect(url) as session:
        joined = held() - before
        found = []
        for _ in range(SYNCS):
            session.push(source)
            found.append(held() - before)
    ours = (torch.cuda.max_memory_reserved() - torch_before) / MIB
    fine = max(found) <= allowed + joined and found[-1] <= found[1]
    print(f"{'ok  ' if fine else 'FAIL'} {what}: joined {joined} MiB (NCCL's own), after the syncs")
    print(f"     {found}, of torch's {ours:.0f}, allowed {allowed:.0f} MiB", flush=True)
    return fine


def main(checkpoint: str) -> int:
    source = streamer.open_source(checkpoint)
    specs = source.specs()
    largest = max(spec.nbytes for spec in specs)
    allowed = (DEFAULT_NUM_BUFFERS * (DEFAULT_BUFFER_SIZE + largest)) / MIB + 64
    server, url = start_server(os.environ.get("RECEIVER_GPU", "0"))
    try:
        torch.zeros(1, device="cuda")
        fine = syncs("from disk", url, checkpoint, allowed)
        tensors = {s.name: torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in specs}
        fine = syncs("on the GPU", url, tensors, allowed) and fine
    finally:
        server.kill()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
