"""A signal in the middle of a sync: the stream is completed first, and then it takes effect."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import streamer
from kit_checks import running
from streamer import StreamerError
from streamer.interrupts import Interrupts, Terminated, terminate

TRAINER = """
import sys, time, torch, streamer
from streamer import TensorSpec, WeightSource

class Slow(WeightSource):
    def specs(self):
        return [TensorSpec(f"t{i}", torch.float32, (1000,)) for i in range(40)]
    def __iter__(self):
        for i in range(40):
            if i == 20:
                print("half", flush=True)
                time.sleep(60)
            yield f"t{i}", torch.full((1000,), float(i))

streamer.push(Slow(), to=sys.argv[1], buffer_size=4000, weight_version="slow")
"""


@pytest.fixture
def trainer(server):
    """A process that is in the middle of a push, its source asleep."""
    with running(TRAINER, server.url) as process:
        assert process.stdout.readline() == "half\n"
        time.sleep(0.3)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_completes_the_stream_and_the_server_goes_on(
    server, trainer, make_source, random_tensor, number
):
    started = time.monotonic()
    trainer.send_signal(number)
    _, errors = trainer.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert trainer.returncode == -number if number == signal.SIGTERM else 1, errors
    assert server.paused
    assert server.weight_version.startswith("streamer-incomplete:slow#")
    tensors = {f"t{i}": random_tensor(torch.float32, (1000,), seed=i) for i in range(40)}
    streamer.push(make_source(tensors), to=server.url)
    assert not server.paused
    assert server.holds(tensors)


def test_a_handler_of_the_program_s_own_decides():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            interrupts.check()
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_default_handlers_are_put_back():
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_second_signal_is_not_held_back():
    def twice():
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second one was held back")

    with pytest.raises(KeyboardInterrupt):
        twice()


def test_in_the_source_the_signal_is_raised_at_once():
    def payloads():
        os.kill(os.getpid(), signal.SIGINT)
        yield torch.zeros(1)

    caught: list[BaseException] = []

    def push():
        with Interrupts() as interrupts:
            try:
                next(interrupts.within(payloads()))
            except KeyboardInterrupt as error:
                caught.append(error)

    with pytest.raises(KeyboardInterrupt):
        push()
    assert len(caught) == 1


def test_elsewhere_than_in_the_main_thread_nothing_is_touched():
    handler = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def run():
        with Interrupts():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [handler]


def test_the_handler_of_the_command_line_is_held_back_too():
    before = signal.signal(signal.SIGTERM, terminate)

    def push():
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            error = StreamerError("it failed")
            error.add_note("http://one holds a mixture")
            raise error

    try:
        with pytest.raises(Terminated) as ended:
            push()
        assert ended.value.__notes__ == ["http://one holds a mixture"]
    finally:
        signal.signal(signal.SIGTERM, before)
