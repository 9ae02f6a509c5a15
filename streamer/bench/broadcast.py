"""Broadcasting: one hot buffer to one worker in a process of its own, which throws it away."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from streamer.bench.measure import BROADCAST, Row, repeated
from streamer.defaults import MIB
from streamer.exceptions import TransportError
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline
from streamer.transport.nccl import NcclTransport

SIZES = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
CUDA_VOLUME = 4 << 30
CPU_VOLUME = 256 * MIB
"""Bytes that one repeat moves."""
_SECONDS = 60.0


class Peer:
    """A worker of the reference server without the server. It ends with the block, or with us."""

    def __init__(self, device: torch.device) -> None:
        command = [sys.executable, "-m", "streamer.receiver.worker", "0", str(device), "--discard"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            start_new_session=True,
        )
        self.pid = self._process.pid

    def tell(self, command: str, *arguments: object) -> None:
        """Have the worker run ``command``; `answer` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `answer` says so
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """What the worker answers. Raises `TransportError` with its error, or if it has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransportError("the process that receives has died: see what it says above")
        answer = json.loads(line)
        if "error" in answer:
            raise TransportError(f"the process that receives: {answer['error']}")
        return answer["result"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        # What could not be written to one that has died is tried again, and waiting goes on.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def measure_broadcast(
    sender: torch.device, receiver: torch.device, repeats: int, volume: int
) -> Iterator[Row]:
    """Rates from ``sender`` to ``receiver`` by the size of one broadcast: NCCL if both are GPUs."""
    with (
        ThreadPoolExecutor(1) as pool,  # ends after the peer, whose answer it may wait for
        Peer(receiver) as peer,
        contextlib.closing(Lifeline.host("127.0.0.1")) as lifeline,
        contextlib.closing(_transport(sender, lifeline)) as transport,
    ):

        def tell(command: str, *arguments: object) -> Future[Any]:
            """Have the peer do it; if that fails, so does what we wait for meanwhile."""
            peer.tell(command, *arguments)
            answer = pool.submit(peer.answer)
            answer.add_done_callback(lambda answer: _end(transport, answer))
            return answer

        tell("checksum").result()  # it runs
        info = {"rank_offset": 1, "world_size": 2, "packed": False}
        joined = tell("init", {**info, **lifeline.rendezvous(), **transport.rendezvous()})
        transport.connect(_SECONDS)
        joined.result()
        for size in SIZES:
            if size <= max(volume, SIZES[0]):
                yield _row(transport, tell, min(size, volume), volume, repeats)


def _transport(device: torch.device, lifeline: Lifeline) -> Transport:
    if device.type == "cuda":
        return NcclTransport(device, 0, 2, lifeline=lifeline)
    return GlooTransport(lifeline, 0, 2)


def _end(transport: Transport, answer: Future[Any]) -> None:
    if answer.exception() is not None:
        transport.abort(str(answer.exception()))


def _row(
    transport: Transport, tell: Callable[..., Future[Any]], size: int, volume: int, repeats: int
) -> Row:
    count = max(volume // size, 1)
    buffer = torch.zeros(size, dtype=torch.uint8, device=transport.device)
    start = torch.zeros(1, dtype=torch.uint8, device=transport.device)
    update = {
        "names": ["start", *(str(number) for number in range(count))],
        "dtype_names": ["uint8"] * (count + 1),
        "shapes": [[1], *([size] for _ in range(count))],
    }

    def run() -> float:
        answer = tell("update", update)
        # One byte first: on a GPU it passes when the worker has read the list and is there.
        transport.broadcast(start, _SECONDS)
        transport.wait(_SECONDS)
        started = time.perf_counter()
        for _ in range(count):
            transport.broadcast(buffer, _SECONDS)
        transport.wait(_SECONDS)
        answer.result()
        return time.perf_counter() - started

    setting = f"{size // MIB} MiB a piece" if size >= MIB else f"{size} bytes a piece"
    kind = transport.device.type
    how = "NCCL" if kind == "cuda" else "Gloo"
    return Row(
        BROADCAST, setting, size, count * size, repeated(run, repeats), kind, f"{how}, hot buffer"
    )
