"""The stages of a bench, one after another."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from streamer.bench.broadcast import CPU_VOLUME, CUDA_VOLUME, measure_broadcast
from streamer.bench.checkpoint import write_checkpoint
from streamer.bench.copy import measure_copy
from streamer.bench.machine import describe_machine, describe_versions
from streamer.bench.measure import BROADCAST, COPY, PUSH, READ, STAGE, Row, deadline
from streamer.bench.push import measure_push, trace_push
from streamer.bench.read import measure_read, measure_stage
from streamer.bench.result import Result
from streamer.defaults import DEFAULT_BUFFER_SIZE
from streamer.exceptions import StreamerError, UsageError, one_line
from streamer.options import ConnectOptions
from streamer.source import WeightSource, specs_of

CPU_SIZE = 256 << 20
CUDA_SIZE = 4 << 30
"""Bytes of a made-up checkpoint."""


@dataclass(frozen=True)
class Devices:
    """The GPUs of a bench. ``sender`` is None without a GPU, ``receiver`` with fewer than two."""

    sender: torch.device | None
    receiver: torch.device | None

    @classmethod
    def find(cls, wanted: str | None) -> Devices:
        """Send from ``wanted``, by default the last GPU; receive on another.

        Raises `UsageError` if ``wanted`` is no GPU of this machine.
        """
        count = torch.cuda.device_count()
        if wanted is None and count == 0:
            return cls(None, None)
        try:
            sender = torch.device(wanted or f"cuda:{count - 1}")
        except RuntimeError:
            sender = torch.device("cpu")
        index = sender.index or 0
        if sender.type != "cuda" or index >= count:
            raise UsageError(f"--device: {wanted!r} is none of the {count} GPUs that torch sees")
        # `streamer serve` puts its first worker on the first GPU.
        receiver = torch.device("cuda", 0) if index > 0 else None
        return cls(torch.device("cuda", index), receiver)


@dataclass(frozen=True)
class Bench:
    """What is measured, and for how long. ``seconds`` is the deadline of each stage.

    ``urls`` are servers to push to; without, ``server()`` gives the URL of one that discards.
    ``trace`` is where the timeline of one push goes. ``say`` is told what is going on.
    """

    source: WeightSource
    repeats: int
    seconds: float
    devices: Devices
    urls: Sequence[str]
    server: Callable[[], str]
    options: ConnectOptions
    cached: bool
    trace: Path | None = None
    say: Callable[[str], None] = lambda text: None
    result: Result = field(
        default_factory=lambda: Result(describe_machine(), describe_versions()), init=False
    )

    def run(self) -> Result:
        """Measure every stage. One that fails does not keep the others from being measured."""
        sender, receiver = self.devices.sender, self.devices.receiver
        repeats = self.repeats
        self._measure(READ, lambda: measure_read(self.source, repeats, cached=self.cached))
        if sender is not None:
            self._measure(COPY, lambda: measure_copy(sender, repeats))
            self._measure(STAGE, lambda: measure_stage(self.source, sender, repeats))
        else:
            self.result.left_out[COPY] = (
                "torch sees no GPU: bytes are sent from where they are read"
            )
        if sender is not None and receiver is not None:
            self._measure(
                BROADCAST, lambda: measure_broadcast(sender, receiver, repeats, CUDA_VOLUME)
            )
        else:
            nbytes = sum(spec.nbytes for spec in specs_of(self.source))
            cpu, volume = torch.device("cpu"), min(CPU_VOLUME, nbytes)
            self._measure(BROADCAST, lambda: measure_broadcast(cpu, cpu, repeats, volume))
            if sender is not None:
                self.result.left_out["broadcast over NCCL"] = (
                    "it needs a second GPU on this machine"
                )
        self._measure(PUSH, self._push)
        return self.result

    def _push(self) -> Iterator[Row]:
        urls = self.urls or [self.server()]
        options = self.options.copy()
        if self.devices.sender is not None:
            options["device"] = self.devices.sender
        yield from measure_push(self.source, urls, self.repeats, options)
        if self.trace is not None:
            self.say("tracing a push ...")
            size = DEFAULT_BUFFER_SIZE
            if (fastest := self.result.push) is not None:
                size = fastest.value
            trace_push(self.source, urls, size, options, self.trace)

    def _measure(self, stage: str, rows: Callable[[], Iterable[Row]]) -> None:
        self.say(f"measuring {stage} ...")
        try:
            with deadline(stage, self.seconds):
                self.result.rows.extend(rows())
        except StreamerError as error:
            self.result.failed[stage] = str(error)
        except Exception as error:  # whatever CUDA says: the other stages are worth having
            self.result.failed[stage] = f"{type(error).__name__}: {one_line(error)}"


@contextlib.contextmanager
def made_up(nbytes: int) -> Iterator[Path]:
    """A folder with a checkpoint of random bytes, which is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="streamer-bench-") as folder:
        write_checkpoint(Path(folder), nbytes)
        yield Path(folder)
