"""NCCL, joined by unique id and cancellable at any moment."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pybase64
import torch

from streamer.exceptions import DeadlineExceeded, TransportError
from streamer.transport import _libnccl as lib
from streamer.transport.base import Transport
from streamer.transport.lifeline import Lifeline


class NcclTransport(Transport):
    """A rank of a non-blocking NCCL communicator.

    Rank 0 makes the unique id, the others are given it. There is no barrier: with vLLM's own engine
    every rank enters `connect` at once. Where workers have a ``lifeline``, rank 0 waits there for
    all of them first: it can say who is missing, and NCCL, which leaves two sockets open after a
    rank that never came (2.28), has not begun. The warm-up is a one-element float32 all-reduce,
    which vLLM's ``PyNcclCommunicator`` issues straight after its own init; without it all ranks
    deadlock.

    Every call returns at once and is polled, so that `abort` never waits for a lock that a stuck
    call holds. A kernel that spins for a dead peer is ended by ``ncclCommAbort``.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world_size: int,
        unique_id: bytes | None = None,
        *,
        lifeline: Lifeline | None = None,
    ) -> None:
        super().__init__(device, rank, world_size)
        self._lifeline = lifeline
        self._lib = lib.library()
        self._comm = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._joined = False
        self._id = lib.UniqueId()
        if unique_id is None:
            self._check(self._lib.ncclGetUniqueId(ctypes.byref(self._id)), "ncclGetUniqueId")
        elif len(unique_id) != lib.UNIQUE_ID_BYTES:
            raise TransportError(
                f"an NCCL unique id has {lib.UNIQUE_ID_BYTES} bytes, this one {len(unique_id)}"
            )
        else:
            ctypes.memmove(ctypes.byref(self._id), unique_id, lib.UNIQUE_ID_BYTES)

    def rendezvous(self) -> dict[str, Any]:
        """``nccl_unique_id_b64``: standard base64, as vLLM demands, of the 128 bytes."""
        return {"nccl_unique_id_b64": pybase64.b64encode(bytes(self._id.internal)).decode()}

    def connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self.rank == 0 and self._lifeline is not None:
            self._lifeline.wait_for_workers(self.world_size, timeout, self.check)
        config = lib.non_blocking_config()
        with torch.cuda.device(self.device):
            with self._lock:
                self.check()
                code = self._lib.ncclCommInitRankConfig(
                    ctypes.byref(self._comm),
                    self.world_size,
                    self._id,
                    self.rank,
                    ctypes.byref(config),
                )
            missing = f"rank {self.rank} waited for {self.world_size} ranks to join over NCCL"
            self._settle(code, deadline, "ncclCommInitRankConfig", missing, pause=1e-3)
            self._joined = True
            warm_up = torch.zeros(1, dtype=torch.float32, device=self.device)
            stream = torch.cuda.current_stream(self.device)
            with self._lock:
                self.check()
                code = self._lib.ncclAllReduce(
                    warm_up.data_ptr(),
                    warm_up.data_ptr(),
                    1,
                    lib.DTYPES[torch.float32],
                    lib.SUM,
                    self._comm,
                    stream.cuda_stream,
                )
            self._settle(code, deadline, "ncclAllReduce", missing, pause=1e-3)
            self.wait(max(deadline - time.monotonic(), 0.0))

    def _broadcast(self, tensor: torch.Tensor, timeout: float) -> None:
        count, dtype = tensor.numel(), lib.DTYPES.get(tensor.dtype)
        if dtype is None:
            count, dtype = tensor.nbytes, lib.DTYPES[torch.uint8]
        deadline = time.monotonic() + timeout
        stream = torch.cuda.current_stream(self.device).cuda_stream
        pointer = tensor.data_ptr()
        with self._lock:
            self.check()
            code = self._lib.ncclBroadcast(pointer, pointer, count, dtype, 0, self._comm, stream)
        self._settle(code, deadline, "ncclBroadcast", "the broadcast was not accepted")

    def _settle(
        self, code: int, deadline: float, call: str, missing: str, pause: float = 0.0
    ) -> None:
        """Poll a call that answered "in progress" until NCCL has taken it."""
        state = ctypes.c_int(code)
        started = time.monotonic()
        while state.value == lib.IN_PROGRESS:
            now = time.monotonic()
            if now > deadline:
                raise DeadlineExceeded(
                    f"{missing}: not done after {now - started:.1f} s; does every worker reach "
                    "this host on the interface that NCCL_SOCKET_IFNAME names?"
                )
            with self._lock:
                self.check()
                code = self._lib.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
                self._check(code, "ncclCommGetAsyncError")
            if state.value == lib.IN_PROGRESS and (pause or now - started > 1e-3):
                time.sleep(pause or 1e-4)
        self._check(state.value, call)

    def _check(self, code: int, call: str) -> None:
        if code not in (lib.SUCCESS, lib.IN_PROGRESS):
            raise TransportError(f"{call}: {lib.describe(code)}")

    def _abort(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, ctypes.c_void_p()
            if comm:
                self._lib.ncclCommAbort(comm)
        if self.rank == 0 and not self._joined:
            lib.dismiss_root(bytes(self._id.internal))

    def close(self) -> None:
        """Free the communicator. ``ncclCommDestroy`` would wait for the peers; abort does not."""
        self.abort("closed")
