"""One worker process of the reference server: ``python -m streamer.receiver.worker``.

It takes commands as JSON lines on standard input and answers each with one line on standard output.
It ends when its server does, which closes the pipe.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
from typing import IO, Any

import torch

from streamer.exceptions import StreamerError
from streamer.payloads import as_memoryview
from streamer.receiver.endpoint import Endpoint, InitInfo

PR_SET_PDEATHSIG = 1


class Worker:
    """Keeps tensors by name, as bytes; or throws them away, with ``discard``."""

    def __init__(self, worker: int, device: torch.device, discard: bool) -> None:
        self._device = device
        self._discard = discard
        self._endpoint = Endpoint(device, worker)
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def init(self, init_info: dict[str, Any]) -> None:
        """Join a trainer's group."""
        self._endpoint.join(InitInfo.parse(init_info), update_open=False)

    def is_syncing(self) -> bool:
        """Whether the trainer is in the middle of a sync."""
        return self._endpoint.is_syncing()

    def update(self, update_info: dict[str, Any]) -> None:
        """Receive one call."""
        try:
            self._endpoint.receive(update_info, self._allocate, self._keep)
        except BaseException:
            # An operation that was abandoned may still write there.
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            raise

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """One buffer, used again and again: `_keep` copies out of it, on the same stream."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:nbytes]

    def _keep(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._discard:
            return
        for name, tensor in tensors:
            data = tensor.view(-1).view(torch.uint8)
            kept = self._tensors.get(name)
            if kept is not None and kept.numel() == data.numel():
                kept.copy_(data)
            else:
                self._tensors[name] = data.clone()

    def checksum(self) -> dict[str, str]:
        """sha256 of each tensor's bytes, by name."""
        return {name: _sha256(data) for name, data in self._tensors.items()}

    def shutdown(self) -> None:
        """Leave the group."""
        self._endpoint.leave()


def _sha256(data: torch.Tensor) -> str:
    on_host = data.cpu()  # what is hashed is a view of it
    return hashlib.sha256(as_memoryview(on_host) if data.numel() else b"").hexdigest()


def serve(worker: Worker, commands: IO[str], answers: IO[str]) -> None:
    """Answer commands until the pipe closes."""
    for line in commands:
        command, argument = json.loads(line)
        try:
            result = getattr(worker, command)(*argument)
            answer = {"result": result}
        except StreamerError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("device")
    parser.add_argument("--discard", action="store_true")
    arguments = parser.parse_args()
    if sys.platform == "linux":
        # A worker that is stuck in a broadcast does not see its pipe close: die with the server.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Answers get a descriptor of their own: whatever a library prints must not mix with them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        serve(Worker(arguments.worker, device, arguments.discard), sys.stdin, answers)
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        # Threads of a transport that hangs must not keep the process.
        os._exit(0)


if __name__ == "__main__":
    main()
