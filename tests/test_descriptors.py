"""A process that may open few files more: said before torch and Gloo hang or end it."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys

import pytest
import torch

import streamer
from streamer import Timeouts, TransportError, descriptors
from streamer.transport.lifeline import Lifeline
from streamer.transport.worker_lifeline import WorkerLifeline

pytestmark = pytest.mark.timeout(120)

PUSH = """
import os, resource, sys
import torch, streamer
from streamer.transport.lifeline import Lifeline

used = len(os.listdir("/proc/self/fd")) - 1
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
url, *limits = sys.argv[1:]
push, timeouts = streamer.push, streamer.Timeouts(20, 20)
source = streamer.open_source({"w": torch.ones(3)})  # what is imported on demand, is by now
for more in map(int, limits):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
    try:
        push(source, url, timeouts=timeouts)
        print("done")
    except streamer.StreamerError as error:
        print(type(error).__name__, error)
    try:
        Lifeline.host("127.0.0.1").close()
    except streamer.StreamerError as error:
        print(type(error).__name__, error)
"""


def test_every_small_limit_is_named(server):
    limits = [0, 3, 6, 9, 12, 15, 18, 22, 26]
    done = subprocess.run(
        [sys.executable, "-c", PUSH, server.url, *map(str, limits)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "done" not in lines
    assert len(lines) > len(limits)
    for line in lines:
        assert line.endswith("raise the limit of open files (ulimit -n)"), line
    assert any("TransportError a group of 2 workers takes up to" in line for line in lines)
    assert "POST" not in done.stdout, "no server was asked to change anything"


def test_what_a_group_takes_is_not_underestimated(server, make_source):
    """If it were, a push at its limit would hang, or end the process."""
    before = len(os.listdir("/proc/self/fd"))
    with streamer.connect(server.url, timeouts=Timeouts(20, 20)) as session:
        session.push(make_source({"w": torch.ones(3)}))
        taken = len(os.listdir("/proc/self/fd")) - before
        assert taken <= descriptors.of_group(server.workers, 1)


def test_no_limit_is_room_for_all(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    descriptors.check_room(1 << 40, "all of it")


def test_a_worker_that_may_open_too_few_says_so(monkeypatch):
    with contextlib.closing(Lifeline.host("127.0.0.1")) as host:
        used = len(os.listdir("/proc/self/fd")) - 1
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 5, 1 << 20))
        with pytest.raises(TransportError, match=f"has {used} and may have {used + 5}: raise the"):
            WorkerLifeline.join("127.0.0.1", host.port, 10)
