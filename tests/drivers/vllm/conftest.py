"""A fake vLLM server, and drivers of it."""

from __future__ import annotations

import pytest

from kit_fake_vllm import FakeVllm
from streamer import Timeouts
from streamer.drivers.http import HttpClient
from streamer.drivers.routes import HttpRoutes
from streamer.drivers.vllm import VllmDriver
from streamer.timeouts import Clock


@pytest.fixture
def vllm(fake_server, reply):
    return FakeVllm(fake_server, reply)


@pytest.fixture
def driver(vllm):
    made: list[VllmDriver] = []

    def make(timeouts=None, probe=True, headers=None, **options):
        timeouts = timeouts or Timeouts(5, 5)
        client = HttpClient(vllm.fake.url, connect_timeout=timeouts.connect, headers=headers)
        made.append(VllmDriver(HttpRoutes(client), clock=Clock(timeouts), **options))
        if probe:
            made[-1].probe()
            vllm.fake.calls.clear()
        return made[-1]

    yield make
    for one in made:
        one.close()
