"""What an engine object answers that no engine of vLLM's would."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from streamer import Engine, IncompatibleServer, Trace
from streamer.drivers.calls import LocalCalls
from streamer.drivers.engine_routes import EngineRoutes


def checksums(said: Any) -> object:
    """What its checksums are taken for where it says this."""
    target = SimpleNamespace(compute_weight_checksums=lambda: said)
    calls = LocalCalls(target, "SimpleNamespace")
    with closing(EngineRoutes(Engine(target), calls, Trace(enabled=False))) as routes:
        return routes.checksums(5.0)


def test_the_checksums_of_all_workers_are_one() -> None:
    assert checksums([{"tp0:w": "1"}, {"tp1:w": "2"}]) == {"tp0:w": "1", "tp1:w": "2"}


@pytest.mark.parametrize("said", [None, 5, {"w": "1"}, "text", [None], [{"w": "1"}, "2"]])
def test_what_are_no_checksums(said: Any) -> None:
    with pytest.raises(IncompatibleServer) as caught:
        checksums(said)
    assert str(caught.value).startswith("SimpleNamespace.compute_weight_checksums returned ")
    assert str(caught.value).endswith(", not the checksums of each worker: push without verify")
