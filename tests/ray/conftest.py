"""A local Ray, and actors on it that hold engines. Run by `make ray`, where Ray is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from kit_sources import checksums_of

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def start_actor(cluster: None) -> Iterator[Callable[..., Any]]:
    """Start an actor of a class; it is up when this returns, and killed at the end of the test."""
    started: list[Any] = []

    def start(kind: type, *arguments: Any) -> Any:
        started.append(ray.remote(num_cpus=0)(kind).remote(*arguments))
        ray.get(started[-1].get_world_size.remote(), timeout=60)
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def holds() -> Callable[[Any, Any], bool]:
    """Whether all workers of an actor hold these tensors. Not in the modules of tests, which actors
    import as well, where there is no kit."""

    def check(actor: Any, tensors: Any) -> bool:
        expected = checksums_of(tensors)
        return all(sums == expected for sums in ray.get(actor.checksums.remote()))

    return check
