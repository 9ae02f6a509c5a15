"""Running the command line: as a process in pipes or on a terminal, or within this one."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from streamer.cli import make_app
from streamer.registry import Registry

COMMAND = (sys.executable, "-m", "streamer")
SECONDS = 60
"""No command of these tests may take longer, whatever else the machine does."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that a failed command says, and nothing but it."""
        assert self.stdout == ""
        assert self.stderr.count("\n") == 1, self.stderr
        head, _, message = self.stderr.rstrip("\n").partition("streamer: error: ")
        assert head == "", self.stderr
        return message


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without what would change the output."""
    unwanted = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "STREAMER_API_KEY", "GITHUB_ACTIONS")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "TERM": "xterm", **more}


@pytest.fixture(scope="session")
def run() -> Callable[..., Ended]:
    """Run ``python -m streamer`` with these arguments, in pipes."""

    def call(*arguments: object, **env: str) -> Ended:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(**env),
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run the command line in this process, in pipes."""
    monkeypatch.delenv("STREAMER_API_KEY", raising=False)

    def call(*arguments: object) -> Ended:
        result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Ended(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``python -m streamer`` in a process group of its own, which is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment(**env),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        with process:
            pass


@pytest.fixture(scope="session")
def children() -> Callable[[int], list[int]]:
    """The processes that a process has started."""

    def find(pid: int) -> list[int]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            return sorted(
                int(child) for task in tasks for child in (task / "children").read_text().split()
            )
        return []

    return find


@pytest.fixture(scope="session")
def on_terminal() -> Callable[..., Ended]:
    """Run ``python -m streamer`` with ``terminal`` (``stdout`` or ``stderr``) on a terminal."""

    def call(terminal: str, *arguments: object, **env: str) -> Ended:
        ours, theirs = pty.openpty()
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        shown: list[bytes] = []

        def read() -> None:
            # The terminal is gone with its last writer, which Linux tells by an error.
            with contextlib.suppress(OSError):
                while data := os.read(ours, 65536):
                    shown.append(data)

        reader = threading.Thread(target=read)
        with subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            **{**streams, terminal: theirs},
            text=True,
            env=environment(COLUMNS="100", **env),
        ) as process:
            os.close(theirs)
            reader.start()
            try:
                texts = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        reader.join()
        os.close(ours)
        text = b"".join(shown).decode()
        stdout, stderr = (text if part is None else part for part in texts)
        return Ended(process.returncode, stdout, stderr)

    return call


@pytest.fixture(scope="session")
def tensors() -> dict[str, torch.Tensor]:
    """What `checkpoint` holds."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model.embed.weight": torch.randn(64, 16, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(16, generator=generator),
        "model.scale": torch.tensor(0.5, dtype=torch.float16),
        "model.steps": torch.arange(5),
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with one safetensors file."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """An empty registry in place of the process's own, to add plugins of a test to."""
    empty = Registry()
    monkeypatch.setattr("streamer.registry._default", empty)
    return empty


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str, str], str]:
    """Install a distribution with one plugin module of this name and source code.

    Returns the ``PYTHONPATH`` that it is found on.
    """

    def make(name: str, code: str) -> str:
        folder = tmp_path / "site"
        info = folder / f"dist_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[streamer]\n{name} = {name}\n")
        return str(folder)

    return make
