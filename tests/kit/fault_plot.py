"""How the fault of one cell is brought about."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fault_proxy import Fault
from fault_table import DONE, FILE, HTTP, PROCESS, UPDATE, Cell
from streamer import WeightSource, open_source
from streamer.broadcast import staging

COUNT, SIZE = 24, 1000
BUFFER_SIZE, CALL_SIZE = 2000, 8000
"""Three tensors a chunk, three chunks a call."""
STEPS = {1: 0, 2: 14, 3: 21}
"""A tensor that is staged after the call of this number has begun, if something waits for that."""
SECONDS = 10.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors whose bytes depend on ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i:02}": torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
        for i in range(COUNT)
    }


def nothing(*_: Any) -> None:
    """Does nothing."""


class Watched(WeightSource):
    """``inner``, with hooks on the thread that iterates it."""

    def __init__(self, inner: WeightSource) -> None:
        self.inner = inner
        self.on_step: Callable[[int], None] = nothing
        self.at_end: Callable[[], None] = nothing
        self.iterating = threading.Event()

    def specs(self) -> Any:
        return self.inner.specs()

    def __iter__(self) -> Iterator[Any]:
        for index, pair in enumerate(self.inner):
            self.iterating.set()
            self.on_step(index)
            yield pair
        self.at_end()

    def close(self) -> None:
        self.inner.close()


class Plot:
    """The fault of ``cell``, and the source to push so that it strikes."""

    def __init__(
        self,
        cell: Cell,
        new: dict[str, torch.Tensor],
        server: Any,
        folder: Path,
        monkeypatch: Any,
        make_source: Callable[..., WeightSource],
        deferred: Callable[..., Any],
    ) -> None:
        self.cell, self.new, self.server, self.folder = cell, new, server, folder
        self.monkeypatch, self.make_source, self.deferred = monkeypatch, make_source, deferred
        self.fault = Fault(cell.phase.path, cell.phase.nth)
        self.step = STEPS[cell.phase.nth]
        self.source = Watched(make_source(new))
        if cell.kind in HTTP:
            self._http()
        elif cell.kind in PROCESS:
            self._at(self._process)
        elif cell.kind in FILE:
            self._file()
        else:
            self._source()

    @property
    def _in_broadcast(self) -> bool:
        return self.cell.phase.path == UPDATE and self.cell.phase.where == "middle"

    def _http(self) -> None:
        fault, where = self.fault, self.cell.phase.where
        fault.how = self.cell.kind
        done = self.cell.kind in DONE or where == "answered"
        fault.asked = "first" if done else "never"
        if where != "middle" or self.cell.kind == "slow":
            return
        fault.asked = "beside"
        if self._in_broadcast:
            fault.go = threading.Event()

            def on_step(index: int) -> None:
                if index == self.step:
                    assert fault.arrived.wait(SECONDS)
                    fault.go.set()
                    if fault.how != "never":
                        assert fault.done.wait(SECONDS)
                    time.sleep(0.1)

            self.source.on_step = on_step

    def _at(self, strike: Callable[[], None]) -> None:
        """``strike()`` in this phase."""
        fault, where = self.fault, self.cell.phase.where
        if self._in_broadcast:

            def on_step(index: int) -> None:
                if index == self.step:
                    assert fault.arrived.wait(SECONDS)
                    strike()

            self.source.on_step = on_step
        elif where == "middle":

            def act() -> None:
                # Nothing of the warm-up is over before this one comes.
                os.kill(self.server.pids[-1], signal.SIGSTOP)
                threading.Timer(0.3, strike).start()

            fault.act = act
        else:
            fault.asked = "first" if where == "answered" else "after"
            fault.act = strike

    def _process(self) -> None:
        who, _, what = self.cell.kind.partition(" ")
        server, worker = self.server.process, self.server.pids[-1]
        number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
        pids = [worker] if who == "worker" else [server.pid]
        if self.cell.kind == "server stopped":
            pids += self.server.pids
        for pid in pids:
            os.kill(pid, number)
        if self.cell.kind == "server killed":
            server.wait()

    def go_on(self) -> None:
        """Whatever was stopped goes on."""
        for pid in (self.server.process.pid, *self.server.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _file(self) -> None:
        path, other = self.folder / "model.safetensors", self.folder / "other.safetensors"
        save_file(self.new, path)
        save_file(weights(9), other)
        self.source = Watched(open_source(path))
        struck = threading.Event()

        def strike() -> None:
            if self.cell.phase.group == "begin":  # not before the file is found unchanged
                assert self.source.iterating.wait(SECONDS)
            if self.cell.kind == "file replaced":
                os.replace(other, path)
            elif self.cell.kind == "file rewritten":
                path.write_bytes(other.read_bytes())
                os.utime(path, (1, 1))
            else:
                os.truncate(path, 1000)
            struck.set()
            if self.cell.phase.group == "begin":
                time.sleep(0.1)  # until it is read

        self._at(strike)
        if self.cell.phase.group in ("begin", "update") and self.cell.phase.where == "arrival":

            def on_step(index: int) -> None:
                if index == self.step:
                    assert struck.wait(SECONDS)

            self.source.on_step = on_step

    def _source(self) -> None:
        phase, kind, name = self.cell.phase, self.cell.kind, f"t{self.step:02}"
        failed = threading.Event()

        def fail(error: Exception) -> None:
            assert self.fault.arrived.wait(SECONDS)
            failed.set()
            raise error

        if phase.group == "begin":

            def act() -> None:
                assert failed.wait(SECONDS)
                time.sleep(0.05)

            self.fault.act = act
        if kind == "source raises" and phase.where == "answered":
            self.source.at_end = lambda: fail(RuntimeError("no such layer"))
        elif kind == "source raises":

            def on_step(index: int) -> None:
                if index == self.step:
                    fail(RuntimeError("no such layer"))

            self.source.on_step = on_step
        elif kind == "read error":
            pairs = {each: self.deferred(tensor) for each, tensor in self.new.items()}
            pairs[name].on_read = lambda *_: fail(OSError(errno.EIO, os.strerror(errno.EIO)))
            self.source = Watched(self.make_source(pairs))
        else:
            self._out_of_memory(self.new[name].data_ptr(), fail)

    def _out_of_memory(self, at: int, fail: Callable[[Exception], None]) -> None:
        error = torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory\n(a trace)")
        allocate, add = staging.Stage.allocate, staging.Stage.add

        def allocate_nothing(stage: Any, nbytes: int) -> torch.Tensor:
            if nbytes:
                raise error
            return allocate(stage, nbytes)

        def add_nothing(stage: Any, fill: Any, payload: Any, *rest: Any) -> None:
            if payload.data_ptr() == at:
                fail(error)
            add(stage, fill, payload, *rest)

        if self.cell.phase.group == "init":
            self.monkeypatch.setattr(staging.Stage, "allocate", allocate_nothing)
        else:
            self.monkeypatch.setattr(staging.Stage, "add", add_nothing)
