"""A trainer of several real processes, which run the scenarios of `trainer.py` in turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("trainer.py")
SIZE = 4
LIMIT = 90.0
"""Seconds after which a scenario hangs: far below the process group's own half an hour."""


@dataclass
class Trainer:
    """Processes that wait for scenarios; the first ``ranks`` of them run one in a fresh group."""

    log: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(
        self, scenario: str, ranks: int, *, dies: int | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """What the scenario gives on each rank: ``value``, or ``error`` and ``text``.

        Rank ``dies`` ends its process, and gives nothing.
        """
        self._start()
        store = self.log.with_name(f"store-{time.monotonic_ns()}")
        order = {"scenario": scenario, "ranks": ranks, "store": str(store), "options": options}
        waiting = dict(enumerate(self.processes[:ranks]))
        with selectors.DefaultSelector() as selector:
            for rank, process in waiting.items():
                assert process.stdin is not None
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            answers: dict[int, dict[str, Any]] = {}
            deadline = time.monotonic() + LIMIT
            while len(answers) < ranks:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                lines = {key.data: key.fileobj.readline() for key, _ in ready}  # type: ignore[union-attr]
                if dies in lines and lines[dies] == "":
                    answers[dies] = {}
                    selector.unregister(self.processes[dies].stdout)
                    del lines[dies]
                if not ready or "" in lines.values():
                    missing = sorted(set(range(ranks)) - answers.keys())
                    self.stop()
                    what = "hangs" if not ready else "died"
                    log = self.log.read_text()[-5000:]
                    pytest.fail(f"{scenario}: rank {missing} {what}; {answers}\n{log}")
                for rank, line in lines.items():
                    answers[rank] = json.loads(line)
                    selector.unregister(self.processes[rank].stdout)
        if dies is not None:
            self.stop()
        return [answers[rank] for rank in range(ranks)]

    def values(self, scenario: str, ranks: int, **options: Any) -> list[Any]:
        """What it gives where no rank may fail."""
        answers = self.run(scenario, ranks, **options)
        assert not [answer for answer in answers if "error" in answer], answers
        return [answer["value"] for answer in answers]

    def _start(self) -> None:
        if self.processes:
            return
        with self.log.open("a") as log:
            for rank in range(SIZE):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    )
                )

    def stop(self) -> None:
        """End every process, whatever it is in."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self.processes = []


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Four processes; they are started once, because importing torch takes seconds."""
    started = Trainer(tmp_path_factory.mktemp("trainer") / "log")
    yield started
    started.stop()


@pytest.fixture
def arrived(server: Any) -> Callable[[dict[str, str]], bool]:
    """Whether every worker of the server holds these tensors (sha256 by name)."""

    def compare(expected: dict[str, str]) -> bool:
        return all(held.items() >= expected.items() for held in server.checksums())

    return compare
