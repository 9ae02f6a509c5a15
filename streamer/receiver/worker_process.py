"""The reference server's end of a worker: its process, and the pipe to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

_LINE_LIMIT = 1 << 30


class Refused(Exception):
    """Answered as vLLM answers: a JSON error with this status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class WorkerProcess:
    """A worker and the pipe to it. Commands queue up behind one that is stuck."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, number: int, device: str, discard: bool) -> WorkerProcess:
        """Start worker ``number`` on ``device``."""
        arguments = [str(number), device, *(["--discard"] if discard else [])]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "streamer.receiver.worker",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            env=_environment(),
            # Ctrl-C goes to the whole process group; the workers end when the server stops them.
            start_new_session=True,
        )
        return cls(number, process)

    async def call(self, command: str, *arguments: Any) -> Any:
        """Run ``command`` in the worker. Raises `Refused` with its error, or if it has died."""
        async with self._lock:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            line = b""
            with contextlib.suppress(ConnectionError):
                if not self.process.stdin.is_closing():  # uvloop would raise a RuntimeError
                    self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
                    await self.process.stdin.drain()
                    line = await self.process.stdout.readline()
        if not line:
            raise Refused(f"worker {self.number} has died: restart the server")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"worker {self.number}: {answer['error']}")
        return answer["result"]

    async def stop(self) -> None:
        """End the process, stuck or not."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def _environment() -> dict[str, str]:
    """That of a worker: all but the key, which it has no use for."""
    kept = {name: value for name, value in os.environ.items() if name != "STREAMER_API_KEY"}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **kept}
