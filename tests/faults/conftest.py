"""The kit of the fault table."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# pytest imports test modules by their paths: they would not find a module beside them.
sys.path.insert(0, str(Path(__file__).parent))
import fault_proxy

sys.path.pop(0)


@pytest.fixture(scope="session")
def _proxy(_shared_server: Any) -> Iterator[fault_proxy.FaultProxy]:
    proxy = fault_proxy.FaultProxy(_shared_server.url)
    yield proxy
    proxy.stop()


def is_worker(pid: int) -> bool:
    """Whether a worker of a reference server is alive."""
    with contextlib.suppress(OSError):
        return b"streamer.receiver.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture
def proxy(server: Any, _proxy: fault_proxy.FaultProxy) -> Iterator[fault_proxy.FaultProxy]:
    """In front of `server`. What a test has stopped goes on after it; a dead worker is replaced."""
    if not all(map(is_worker, server.pids)):
        server.kill()
        server.start()
    yield _proxy
    _proxy.heal()
    for pid in (server.process.pid, *server.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
