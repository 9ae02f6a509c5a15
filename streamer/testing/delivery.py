"""A sync within one process: the real broadcaster, and workers that run the real receive loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence

import torch

from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.exceptions import StreamerError
from streamer.plan import Plan, make_plan
from streamer.receiver.loop import Layout, receive
from streamer.source import Payload, TensorSpec, WeightSource
from streamer.testing.loopback import LoopbackGroup
from streamer.testing.recording import bytes_of

WORKERS = 2
THREADS = 4
PATIENCE = 30.0
"""Seconds for one read or broadcast."""


def deliver(
    source: WeightSource, specs: Sequence[TensorSpec], *, packed: bool, buffer_size: int
) -> list[dict[str, bytes]]:
    """Send ``source``, as ``specs`` describe it, to `WORKERS` workers: the bytes that each got.

    ``specs`` are taken at their word: names of tensors are not compared. Raises what a push would.
    """
    plan = make_plan(specs, packed=packed, buffer_size=buffer_size)
    group = LoopbackGroup(1 + WORKERS)
    workers = [_Worker(group, rank, plan) for rank in range(1, 1 + WORKERS)]
    transport = group.transport(0)
    broadcaster = Broadcaster(transport, threads=THREADS)

    def conduct(stream: ChunkStream) -> None:
        for call in plan.calls:
            if stream.failure is not None:
                return
            stream.send(call)
        for worker in workers:
            worker.join()

    try:
        with contextlib.closing(_payloads(source)) as payloads:
            broadcaster.sync(plan, payloads, conduct, source=source, progress_timeout=PATIENCE)
    finally:
        transport.close()
        broadcaster.close()
        for worker in workers:
            worker.thread.join()
    return [worker.received for worker in workers]


def _payloads(source: WeightSource) -> Generator[Payload, None, None]:
    for _, payload in source:
        yield payload


class _Worker:
    """One rank, on a thread of its own. It keeps the bytes of all calls by name."""

    def __init__(self, group: LoopbackGroup, rank: int, plan: Plan) -> None:
        self.received: dict[str, bytes] = {}
        self._failure: StreamerError | None = None
        self._transport = group.transport(rank)
        self._plan = plan
        self.thread = threading.Thread(target=self._run, name=f"worker-{rank}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for call in self._plan.calls:
                receive(
                    self._transport,
                    Layout.of(
                        call.wire_specs(),
                        packed=self._plan.packed,
                        buffer_size=self._plan.buffer_size,
                    ),
                    allocate=lambda nbytes: torch.full((nbytes,), 0xAA, dtype=torch.uint8),
                    sink=self._keep,
                    timeout=PATIENCE,
                )
        except StreamerError as error:
            self._failure = error

    def _keep(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.received.update((name, bytes_of(tensor)) for name, tensor in tensors)

    def join(self) -> None:
        """Wait for the last chunk. Raises what the receive loop has raised."""
        self.thread.join(PATIENCE)
        if self._failure is not None:
            raise self._failure
