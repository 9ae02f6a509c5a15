"""What NCCL alone keeps of communicators that are gone: growth.py [ROUNDS]

Two processes make a communicator, reduce one element and free it, over and over, with nothing of
streamer's but its binding of the library: on two GPUs, or on one where ``NCCL_HOSTID`` is set (see
run.sh). Once more with a broadcast on the way that the other process does not take, as in a sync
that fails; and once more so, with glibc's threshold for what it gives back at once fixed. Left to
itself, glibc raises that to 32 MiB at the first large block that NCCL frees, and then keeps what
NCCL's next threads free in their heaps: some 37 MiB each.

Prints by how much each process has grown since the first, for each.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

from streamer.transport import _libnccl as lib

WARM = 1
NBYTES = 1 << 20


def resident() -> float:
    """MiB of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def settle(nccl: ctypes.CDLL, comm: ctypes.c_void_p, code: int) -> None:
    state = ctypes.c_int(code)
    while state.value == lib.IN_PROGRESS:
        time.sleep(1e-3)
        nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
    if state.value != lib.SUCCESS:
        raise SystemExit(f"NCCL: {lib.describe(state.value)}")


def join(nccl: ctypes.CDLL, unique_id: lib.UniqueId, rank: int) -> ctypes.c_void_p:
    """A communicator of two ranks that has reduced one element."""
    comm, config = ctypes.c_void_p(), lib.non_blocking_config()
    code = nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, unique_id, rank, ctypes.byref(config))
    settle(nccl, comm, code)
    one, stream = torch.zeros(1, device="cuda"), torch.cuda.current_stream()
    at, dtype = one.data_ptr(), lib.DTYPES[torch.float32]
    settle(nccl, comm, nccl.ncclAllReduce(at, at, 1, dtype, lib.SUM, comm, stream.cuda_stream))
    stream.synchronize()
    return comm


def leave_stuck(nccl: ctypes.CDLL, comm: ctypes.c_void_p) -> None:
    """A broadcast that nobody takes."""
    data, stream = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    at, dtype = data.data_ptr(), lib.DTYPES[torch.uint8]
    settle(nccl, comm, nccl.ncclBroadcast(at, at, NBYTES, dtype, 0, comm, stream.cuda_stream))
    time.sleep(0.02)


def run(rank: int, port: int, rounds: int, stuck: bool) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store, nccl = TCPStore("127.0.0.1", port, is_master=False), lib.library()
    before = 0.0
    for number in range(WARM + rounds):
        unique_id = lib.UniqueId()
        if rank == 0:
            nccl.ncclGetUniqueId(ctypes.byref(unique_id))
            store.set(str(number), bytes(unique_id.internal))
        else:
            ctypes.memmove(ctypes.byref(unique_id), store.get(str(number)), lib.UNIQUE_ID_BYTES)
        comm = join(nccl, unique_id, rank)
        # An abort takes along what has not reached the peer yet, which would wait for it for ever.
        store.set(f"{number} {rank}", "joined")
        store.wait([f"{number} 0", f"{number} 1"])
        if stuck and rank == 0:
            leave_stuck(nccl, comm)
        nccl.ncclCommAbort(comm)
        if number == WARM - 1:
            before = resident()
    grown = resident() - before
    how = "aborted in a broadcast" if stuck else "aborted"
    how += ", threshold fixed" if "MALLOC_MMAP_THRESHOLD_" in os.environ else ""
    print(f"rank {rank}, {how}: {grown:.1f} MiB in {rounds}, {grown / rounds:.2f} each", flush=True)


def both(rounds: int, stuck: bool, **settings: str) -> int:
    """Run the two ranks to their end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in (0, 1):
        environment = os.environ | settings
        if "NCCL_HOSTID" in environment:
            environment["NCCL_HOSTID"] += f"-{rank}"
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-W", "ignore", __file__, str(rounds), str(rank)]
        command += [str(store.port), str(int(stuck))]
        ranks.append(subprocess.Popen(command, env=environment))
    return max(rank.wait() for rank in ranks)


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    return (
        both(rounds, False)
        or both(rounds, True)
        or both(rounds, True, MALLOC_MMAP_THRESHOLD_="131072")
    )


if __name__ == "__main__":
    if len(sys.argv) == 5:
        run(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[1]), sys.argv[4] == "1")
    else:
        sys.exit(main())
