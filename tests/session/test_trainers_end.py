"""Trainers are suspended, killed and interrupted, and exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from kit_checks import running
from kit_session import JOIN, UPDATE, weights
from streamer import SourceError, StreamerError, Timeouts
from streamer.drivers.mark import INCOMPLETE
from streamer.transport.lifeline import BEAT_SECONDS
from streamer.transport.store import SILENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

PAUSED = """
import sys
import torch
import streamer

with streamer.connect(sys.argv[1]) as session:
    for value, line in enumerate(sys.stdin):
        session.push({"a": torch.full((1000,), float(value))}, weight_version=f"v{value}")
        print("pushed", flush=True)
"""


@pytest.mark.parametrize("pushed", [0, 1], ids=["before the first push", "between pushes"])
def test_a_trainer_that_was_suspended_joins_again(server, pushed, eventually):
    """Its workers have given it up meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def push():
        process.stdin.write("push\n")
        process.stdin.flush()

    try:
        server.heal()
        eventually(lambda: JOIN in server.calls, 30)
        for _ in range(pushed):
            push()
            assert process.stdout.readline() == "pushed\n"
        time.sleep(1)  # joined by now
        process.send_signal(signal.SIGSTOP)
        time.sleep(BEAT_SECONDS + SILENCE_SECONDS + 4)
        push()  # at once when it goes on
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "pushed\n"
        assert server.holds({"a": torch.full((1000,), float(pushed))})
        assert server.weight_version == f"v{pushed}"
        assert not server.paused
        assert server.calls.count(JOIN) == 2
        assert server.calls.count(UPDATE) == pushed + 1
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


TRAINER = """
import os, signal, sys, time
import torch
import streamer
from streamer import TensorSpec, WeightSource

class Slow(WeightSource):
    def specs(self):
        return [TensorSpec(f"t{i}", torch.float32, (100_000,)) for i in range(40)]
    def __iter__(self):
        for spec in self.specs():
            time.sleep(0.05)
            print(spec.name, flush=True)
            yield spec.name, torch.zeros(spec.shape)

session = streamer.connect(sys.argv[1], buffer_size=1000)
print("connected", flush=True)
session.push(Slow(), weight_version="from-a-trainer")
print("pushed", flush=True)
session.close()
"""


AT_EXIT = """
import atexit, sys
import torch
import streamer

class Trainer:
    def __init__(self, session):
        self.session = session
    def __del__(self):
        self.session.close()

session = streamer.connect(sys.argv[1])
session.push({"a": torch.ones(3)})
if sys.argv[2] == "atexit":
    atexit.register(session.close)
else:
    trainer = Trainer(session)
"""


@pytest.mark.parametrize("how", ["atexit", "del"])
def test_a_session_can_be_closed_while_the_interpreter_exits(server, how):
    """Where no thread can be started any more."""
    server.heal()
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, server.url, how], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert server.calls[-1] == "POST /shutdown_weight_transfer_engine"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_that_dies_leaves_a_server_that_goes_on(server, session, push, how):
    """Its workers leave the broadcast by themselves; the next trainer finds the mark and cures."""
    with running(TRAINER, server.url) as process:
        for line in process.stdout:
            if line == "t9\n":
                break
        process.send_signal(how)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            server.heal()
            try:
                one = session(server, timeouts=Timeouts(connect=10, progress=10))
                break
            except StreamerError:
                time.sleep(0.5)
        assert server.weight_version.startswith(f"{INCOMPLETE}from-a-trainer#")
        assert server.paused
        push(one, [server], weights(3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_completes_the_stream_first(server, session, push, number):
    """A worker that is left inside a broadcast of vLLM's own engine never answers again."""
    with running(TRAINER, server.url) as process:
        for line in process.stdout:
            if line == "t9\n":
                break
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) != 0
        assert time.monotonic() - started < 10
        error = process.stderr.read()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in error
        assert "holds a mixture" in error
    else:
        assert process.returncode == -signal.SIGTERM
    assert server.weight_version.startswith(f"{INCOMPLETE}from-a-trainer#")
    server.heal()
    push(session(server), [server], weights(3))


def test_a_second_signal_ends_the_trainer_whatever_it_waits_for(server):
    """Here the server never receives, and the stream cannot be completed."""
    server.fail("/update_weights", 500, delay=60)
    code = TRAINER.replace("100_000", "5_000_000")
    with running(code, server.url) as process:
        for line in process.stdout:
            if line == "t1\n":
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(15) != 0


def test_a_signal_that_the_trainer_ignores_stops_nothing(server):
    code = TRAINER.replace("session =", "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsession =")
    with running(code, server.url) as process:
        for line in process.stdout:
            if line == "t9\n":
                break
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith("pushed\n")
        assert process.wait(30) == 0


def test_a_handler_of_the_trainer_s_own_is_called_and_decides(server):
    """A cluster's SIGTERM often only asks to stop at the next step."""
    code = TRAINER.replace(
        "session =",
        "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\nsession =",
    ).replace('print("pushed"', 'print("pushed", *asked')
    with running(code, server.url) as process:
        for line in process.stdout:
            if line == "t9\n":
                break
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith("pushed 1\n")
        assert process.wait(30) == 0
    assert server.weight_version == "from-a-trainer"


def test_handlers_are_put_back_and_threads_may_push(session, server, make_source):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    one = session(server)
    one.push(make_source(weights(1)))
    with pytest.raises(SourceError):
        one.push(make_source(weights(1), on_step=lambda index: 1 / 0))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    reports = []
    thread = threading.Thread(
        target=lambda: reports.append(one.push(make_source(weights(2)), weight_version="thread"))
    )
    thread.start()
    thread.join()
    assert reports[0].weight_version == "thread"
    assert server.holds(weights(2))
