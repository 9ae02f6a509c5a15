"""An engine without vLLM that keeps what it receives: for tests of whoever drives engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from streamer.exceptions import StreamerError
from streamer.receiver.worker import Worker


class LocalEngine:
    """Workers of the ``streamer`` backend on CPUs, as threads of this process.

    Has the methods of vLLM's engines that a push uses, with vLLM's rules: no update without a
    start, no second start before the finish, and a failed update is over. It can be pushed to as it
    is, or be held by a Ray actor. Close it, or its idle threads stay.
    """

    backend = "streamer"
    device = "cpu"

    def __init__(self, workers: int = 1) -> None:
        self.world_size = workers
        self._workers = [Worker(number, torch.device("cpu"), False) for number in range(workers)]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="engine")
        self._updating = False
        self._paused = False
        self._version = "default"

    def get_world_size(self) -> int:
        """How many workers."""
        return self.world_size

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join a trainer's group."""
        self._updating = False
        self._all(lambda worker: worker.init(dict(init_info)))

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave it."""
        self._all(lambda worker: worker.shutdown())

    def start_weight_update(self) -> None:
        """Open an update."""
        if self._updating:
            raise StreamerError(
                "a weight update is active already: call finish_weight_update first"
            )
        self._updating = True

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive one call."""
        if not self._updating:
            raise StreamerError("no update is open: start one first")
        try:
            self._all(lambda worker: worker.update(dict(update_info)))
        except BaseException:
            self._updating = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update."""
        if not self._updating:
            raise StreamerError("finish_weight_update called without start_weight_update")
        self._updating = False
        self._version = weight_version or self._version

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        self._version = new_version

    def get_weight_version(self) -> str:
        """What they are called."""
        return self._version

    def pause_generation(self, mode: str = "abort") -> None:
        """Nothing is generated here, but `is_paused` tells."""
        self._paused = True

    def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        self._paused = False

    def is_paused(self) -> bool:
        """Whether it is paused."""
        return self._paused

    def checksums(self) -> list[dict[str, str]]:
        """sha256 of the bytes of each tensor, worker by worker."""
        return [worker.checksum() for worker in self._workers]

    def close(self) -> None:
        """Leave, and end the threads."""
        self.shutdown_weight_transfer_engine()
        self._pool.shutdown()

    def _all(self, step: Callable[[Worker], None]) -> None:
        """Run ``step`` on every worker at once; when all are through, raise the first error."""
        futures = [self._pool.submit(step, worker) for worker in self._workers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
