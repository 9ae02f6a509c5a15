"""The kit of the fault table."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import fault_proxy
from kit_reference import is_worker


@pytest.fixture(scope="session")
def _proxy(_shared_server: Any) -> Iterator[fault_proxy.FaultProxy]:
    proxy = fault_proxy.FaultProxy(_shared_server.url)
    yield proxy
    proxy.stop()


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
