"""To wait, to look for what is left, and to run a test both ways."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streamer import Held, StreamerError

PATIENCE = 20.0
"""How long a test waits for what ought to come within a second or two: the machine may be busy."""


def told(held: Held | None) -> str:
    """What is said of a server, nothing if nothing is."""
    return "" if held is None else str(held)


def all_told(error: StreamerError) -> dict[str, str]:
    """What an error says of each server, by URL."""
    return {url: str(held) for url, held in error.held.items()}


both_modes = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Wait until ``condition()`` holds; fail with its name after ``seconds``."""

    def wait(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {condition}"
            time.sleep(0.02)

    return wait


def find_free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """`find_free_port`."""
    return find_free_port


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of this program, killed at the end. Its output and errors are pipes."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:  # which closes the pipes, and waits
        try:
            yield process
        finally:
            process.kill()


def open_files() -> list[str]:
    """What the file descriptors of this process lead to."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


def our_threads() -> list[str]:
    """Names of the threads that streamer has started."""
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("streamer")
    )


@pytest.fixture
def leaks() -> Callable[[], dict[str, int]]:
    """Count what must not grow: descriptors, Python's threads, all of the process's threads."""

    def count() -> dict[str, int]:
        return {
            "fds": len(open_files()),
            "threads": len(our_threads()),
            "tasks": len(os.listdir("/proc/self/task")),
        }

    return count


@pytest.fixture
def no_threads_left(eventually: Callable[..., None]) -> Iterator[None]:
    """None of our threads outlives the test."""
    eventually(lambda: our_threads() == [])  # of the test before, on a busy machine
    yield
    with contextlib.suppress(AssertionError):
        eventually(lambda: not our_threads(), 10)
    assert our_threads() == []
