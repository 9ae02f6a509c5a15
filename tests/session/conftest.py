"""Sessions of real reference servers."""

from __future__ import annotations

import pytest

import streamer
from kit_session import TIMEOUTS
from streamer import Session


@pytest.fixture
def session():
    """Sessions that are closed at the end of the test."""
    made: list[Session] = []

    def make(*servers, **options):
        options = {"timeouts": TIMEOUTS, "buffer_size": 2000, **options}
        made.append(streamer.connect([server.url for server in servers], **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def nothing_left(no_threads_left):
    """Every test here ends without a thread of ours."""


@pytest.fixture
def push(make_source):
    """Push tensors and see that every server holds them and answers again."""

    def push(session, servers, tensors, **options):
        report = session.push(make_source(tensors), **options)
        for server in servers:
            assert server.holds(tensors)
            assert not server.paused
            assert server.weight_version == report.weight_version
        return report

    return push
