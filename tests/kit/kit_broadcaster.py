"""A trainer's data path and its workers, in one process."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from concurrent.futures import Future

import torch

from kit_checks import PATIENCE
from streamer import make_plan
from streamer.broadcast.broadcaster import Broadcaster
from streamer.receiver.loop import Layout, parse_update, receive
from streamer.source import checked
from streamer.testing.loopback import LoopbackGroup


class Worker:
    """A rank that receives call after call and keeps the bytes by name."""

    def __init__(self, group, rank, packed, buffer_size):
        self.transport = group.transport(rank)
        self.packed, self.buffer_size = packed, buffer_size
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], bytes]] = {}
        self.chunks: list[list[str]] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while (item := self.calls.get()) is not None:
            update, answer = item
            try:
                receive(
                    self.transport,
                    Layout.of(
                        parse_update(json.loads(json.dumps(update))),
                        packed=self.packed,
                        buffer_size=self.buffer_size,
                        chunk_sizes=update["chunk_sizes"] if self.packed else None,
                    ),
                    allocate=lambda n: torch.full((n,), 0xAA, dtype=torch.uint8),
                    sink=self.keep,
                    timeout=PATIENCE,
                )
                answer.set_result(None)
            except Exception as error:
                answer.set_exception(error)

    def keep(self, tensors):
        self.chunks.append([name for name, _ in tensors])
        for name, tensor in tensors:
            data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
            self.tensors[name] = (tensor.dtype, tuple(tensor.shape), data)

    def receive(self, call) -> Future:
        specs = call.wire_specs()
        answer: Future = Future()
        update = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype_name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "chunk_sizes": [chunk.nbytes for chunk in call.chunks],
        }
        self.calls.put((update, answer))
        return answer


class Rig:
    """A trainer and its workers in one process."""

    def __init__(
        self,
        *,
        packed=True,
        buffer_size=64,
        call_size=8 << 30,
        workers=1,
        num_buffers=3,
        threads=3,
        progress=PATIENCE,
    ):
        self.packed, self.buffer_size, self.call_size = packed, buffer_size, call_size
        self.group = LoopbackGroup(1 + workers)
        self.transport = self.group.transport(0)
        self.workers = [
            Worker(self.group, rank, packed, buffer_size) for rank in range(1, 1 + workers)
        ]
        self.progress = progress
        self.broadcaster = Broadcaster(self.transport, num_buffers=num_buffers, threads=threads)
        self.calls = 0
        self.on_call = lambda index: None
        self.begin = lambda: None

    def plan(self, source):
        return make_plan(
            source.specs(),
            packed=self.packed,
            buffer_size=self.buffer_size,
            call_size=self.call_size,
        )

    def sync(self, source, **options):
        """What a session does: every call is answered before the next is made."""
        plan = self.plan(source)
        specs = [spec for chunk in plan.chunks for spec in chunk.specs]

        def conduct(stream):
            self.begin()
            for index, call in enumerate(plan.calls):
                if stream.failure is not None:
                    return
                self.calls += 1
                self.on_call(index)
                answers = [worker.receive(call) for worker in self.workers]
                stream.send(call)
                for answer in answers:
                    answer.result(PATIENCE)

        with contextlib.closing(checked(source, specs)) as payloads:
            self.broadcaster.sync(
                plan, payloads, conduct, source=source, progress_timeout=self.progress, **options
            )
        return plan

    def buffers(self):
        memory = self.broadcaster._ring.memory
        return memory.data_ptr(), memory.numel()

    def close(self):
        self.transport.close()
        self.broadcaster.close()
        for worker in self.workers:
            worker.calls.put(None)
            worker.thread.join(PATIENCE)
            assert not worker.thread.is_alive()


def values(seed, count=8, size=10):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i in range(count)
    }
