"""Gloo between real processes, and what happens when one of them is stuck or gone."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from kit_checks import running
from streamer import DeadlineExceeded, TransportError
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline, worker_key
from streamer.transport.worker_lifeline import WorkerLifeline

pytestmark = pytest.mark.timeout(60)

WORKER = """
import hashlib, json, os, sys, time
import torch
from streamer import StreamerError
from streamer.transport.gloo import GlooTransport
from streamer.transport.worker_lifeline import WorkerLifeline

rank, world_size, port = map(int, sys.argv[1:4])
lifeline = WorkerLifeline.join("127.0.0.1", port, 30)
lifeline.report(rank)
transport = GlooTransport(lifeline, rank, world_size)
transport.connect(30)

def tell(value):
    print(json.dumps(value), flush=True)

def receive(dtype, shape, timeout=30):
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    tensor = torch.zeros(count, dtype=torch.uint8).view(dtype).view(shape)
    transport.broadcast(tensor, timeout)
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    return hashlib.sha256(data).hexdigest()

tell("joined")
"""

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
LARGE = 64 << 20
"""Bytes that no socket's buffers hold: sending them needs somebody who receives."""


class Group:
    """Rank 0 here, the others in processes that run ``WORKER`` and what the test adds to it."""

    def __init__(self) -> None:
        self.lifeline = Lifeline.host("127.0.0.1")
        self.workers: list[subprocess.Popen] = []
        self.transport: GlooTransport | None = None

    def start(self, code: str, world_size: int = 2, present: int | None = None) -> GlooTransport:
        for rank in range(1, world_size if present is None else 1 + present):
            arguments = [str(rank), str(world_size), str(self.lifeline.port)]
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER + code, *arguments],
                    stdout=subprocess.PIPE,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )
            )
        self.transport = GlooTransport(self.lifeline, 0, world_size, operation_timeout=30)
        return self.transport

    def join(self) -> None:
        self.transport.connect(30)
        for worker in self.workers:
            assert worker.stdout.readline() == '"joined"\n'

    def said(self, rank: int = 1) -> str:
        return self.workers[rank - 1].stdout.readline().strip()

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
        if self.transport is not None:
            self.transport.close()
        self.lifeline.close()


@pytest.fixture
def group():
    started = Group()
    yield started
    started.end()


@pytest.fixture
def pair():
    """Two ranks in this process, which have joined."""
    host = Lifeline.host("127.0.0.1")
    guest = WorkerLifeline.join("127.0.0.1", host.port, 10)
    guest.report(1)
    ends = GlooTransport(host, 0, 2), GlooTransport(guest, 1, 2)
    other = threading.Thread(target=ends[1].connect, args=(20,))
    other.start()
    ends[0].connect(20)
    other.join()
    yield ends
    for end in ends:
        end.close()
    guest.close()
    host.close()


def in_thread(call):
    """Run ``call``; the thread, and a list that will hold what it raised."""
    errors: list[BaseException] = []

    def run():
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_every_dtype_reaches_every_process(group, random_tensor, bytes_of):
    shapes = [(5, 3), (), (300, 7)]
    listed = [(dtype, shape) for dtype in DTYPES for shape in shapes]
    code = "for dtype, shape in [" + ", ".join(f"({d}, {s})" for d, s in listed) + "]:\n"
    code += "    tell(receive(dtype, shape))\n"
    transport = group.start(code, world_size=3)
    group.join()
    for dtype, shape in listed:
        sent = random_tensor(dtype, shape, seed=len(shape))
        digest = hashlib.sha256(bytes_of(sent)).hexdigest()
        transport.broadcast(sent, 30)
        assert hashlib.sha256(bytes_of(sent)).hexdigest() == digest
        assert [group.said(1), group.said(2)] == [f'"{digest}"'] * 2, (dtype, shape)


def test_an_empty_tensor_takes_part_in_no_collective(pair):
    sender, worker = pair
    sender.broadcast(torch.zeros(0), 5)
    sender.broadcast(torch.zeros(3, 0, dtype=torch.bfloat16), 5)
    value = torch.zeros(4)
    thread, errors = in_thread(lambda: worker.broadcast(value, 20))
    sender.broadcast(torch.ones(4), 20)
    thread.join()
    assert errors == []
    assert value.eq(1).all()


def test_the_sender_may_reuse_its_memory_after_a_broadcast(pair):
    sender, worker = pair
    sums: list[float] = []

    def receive():
        for _ in range(50):
            value = torch.zeros(10_000)
            worker.broadcast(value, 20)
            sums.append(value.sum().item())

    thread, errors = in_thread(receive)
    buffer = torch.zeros(10_000)
    for value in range(50):
        buffer.fill_(float(value))
        sender.broadcast(buffer, 20)
    thread.join()
    assert errors == []
    assert sums == [10_000.0 * value for value in range(50)]


def test_abort_from_another_thread_wakes_a_broadcast(group, eventually):
    """And closing with an operation inside Gloo returns at once, with Python running on."""
    transport = group.start("time.sleep(60)")
    group.join()
    thread, errors = in_thread(lambda: transport.broadcast(torch.zeros(LARGE), 60))
    eventually(lambda: transport._pending is not None)
    time.sleep(0.3)
    assert thread.is_alive()
    started = time.monotonic()
    transport.abort("the test says so")
    thread.join(10)
    assert time.monotonic() - started < 1
    assert isinstance(errors[0], TransportError)
    assert str(errors[0]) == "broadcast group: the test says so"

    started = time.monotonic()
    transport.close()
    transport.close()
    assert time.monotonic() - started < 0.5
    started = time.monotonic()
    time.sleep(0.3)
    assert time.monotonic() - started < 2, "the interpreter was held by the dying group"
    group.workers[0].kill()
    eventually(lambda: not any(t.name == "streamer-gloo" for t in threading.enumerate()))


def test_abort_wakes_a_worker_that_receives(pair, eventually):
    _, worker = pair
    thread, errors = in_thread(lambda: worker.broadcast(torch.zeros(8), 60))
    eventually(lambda: worker._pending is not None)
    started = time.monotonic()
    worker.abort("the trainer is gone")
    thread.join(10)
    assert time.monotonic() - started < 1
    assert str(errors[0]) == "broadcast group: the trainer is gone"


def test_a_peer_that_is_killed_is_an_error_within_seconds(group):
    transport = group.start("time.sleep(60)")
    group.join()
    thread, errors = in_thread(lambda: transport.broadcast(torch.zeros(LARGE), 60))
    time.sleep(0.3)
    started = time.monotonic()
    group.workers[0].kill()
    thread.join(20)
    assert time.monotonic() - started < 5
    assert isinstance(errors[0], TransportError)
    assert "a worker has left the broadcast group" in str(errors[0])
    assert "/pair.cc" not in str(errors[0])
    assert str(errors[0]).isprintable()


def test_a_worker_is_told_when_the_sender_closes(group):
    code = """
try:
    receive(torch.float32, (8,))
except StreamerError as error:
    tell(type(error).__name__)
"""
    transport = group.start(code)
    group.join()
    started = time.monotonic()
    transport.close()
    assert group.said() == '"TransportError"'
    assert time.monotonic() - started < 5


def test_a_worker_that_does_not_receive_ends_at_the_deadline(group):
    transport = group.start("time.sleep(60)")
    group.join()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        transport.broadcast(torch.zeros(LARGE), 1)
    assert 0.9 < time.monotonic() - started < 4
    assert "a worker is stuck or gone" in str(caught.value)
    assert "1 s" in str(caught.value)


def test_a_rank_that_is_missing_is_named(group):
    transport = group.start("time.sleep(60)", world_size=4, present=0)
    group.lifeline.store.set(worker_key(2), "{}")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        transport.connect(0.5)
    assert time.monotonic() - started < 5
    assert "of 3 workers, ranks [1, 3] have not joined 127.0.0.1" in str(caught.value)


def test_a_rank_that_reports_and_never_comes_ends_at_the_deadline(group):
    transport = group.start("", world_size=2, present=0)
    group.lifeline.store.set(worker_key(1), "{}")
    started = time.monotonic()
    with pytest.raises((TransportError, DeadlineExceeded)) as caught:
        transport.connect(1)
    assert time.monotonic() - started < 10
    assert "rank 0 waited for 2 ranks to join over Gloo" in str(caught.value)
    assert str(caught.value).isprintable()


def test_waiting_for_ranks_can_be_aborted(group):
    transport = group.start("", world_size=2, present=0)
    thread, errors = in_thread(lambda: transport.connect(60))
    time.sleep(0.2)
    started = time.monotonic()
    transport.abort("a server refused")
    thread.join(10)
    assert time.monotonic() - started < 1
    assert str(errors[0]) == "broadcast group: a server refused"


def test_a_broadcast_before_joining_is_an_error(group):
    transport = group.start("", present=0)
    with pytest.raises(TransportError, match="has not joined its broadcast group yet"):
        transport.broadcast(torch.zeros(1), 1)
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.connect(1)


def test_an_operation_that_ends_just_after_a_slice_of_waiting_has_succeeded(group):
    """Gloo's wait raises when its slice is over; the operation may be done an instant later."""

    class Work:
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return self.waits > 0

    transport = group.start("", present=0)
    transport._finish(Work(), 5, "late")
    assert transport._pending is None


def test_an_operation_that_fails_without_a_word_is_an_error_at_once(group):
    class Work:
        def wait(self, timeout=None):
            raise RuntimeError

        def is_completed(self):
            return True

    transport = group.start("", present=0)
    with pytest.raises(TransportError, match=r"\(Gloo: RuntimeError\)"):
        transport._finish(Work(), 5, "late")


def test_coming_and_going_leaks_nothing(leaks, eventually):
    def once():
        host = Lifeline.host("127.0.0.1")
        guest = WorkerLifeline.join("127.0.0.1", host.port, 10)
        guest.report(1)
        ends = GlooTransport(host, 0, 2), GlooTransport(guest, 1, 2)
        other = threading.Thread(target=ends[1].connect, args=(20,))
        other.start()
        ends[0].connect(20)
        other.join()
        value = torch.zeros(1000)
        other = threading.Thread(target=ends[1].broadcast, args=(value, 20))
        other.start()
        ends[0].broadcast(torch.ones(1000), 20)
        other.join()
        assert value.eq(1).all()
        for end in ends:
            end.close()
        guest.close()
        host.close()

    for _ in range(3):
        once()
    before = leaks()
    for _ in range(15):
        once()
    eventually(lambda: leaks()["fds"] <= before["fds"] and leaks()["tasks"] <= before["tasks"], 10)


def test_failing_leaks_nothing(leaks, eventually):
    """An error that the caller keeps must not keep the group's sockets open."""
    kept: list[BaseException] = []

    def once():
        host = Lifeline.host("127.0.0.1")
        guest = WorkerLifeline.join("127.0.0.1", host.port, 10)
        guest.report(1)
        ends = GlooTransport(host, 0, 2), GlooTransport(guest, 1, 2)
        other = threading.Thread(target=ends[1].connect, args=(20,))
        other.start()
        ends[0].connect(20)
        other.join()
        thread, errors = in_thread(lambda: ends[1].broadcast(torch.zeros(8), 60))
        while ends[1]._pending is None:
            time.sleep(0.01)
        for end in ends:
            end.close()
        thread.join()
        assert isinstance(errors[0], TransportError)
        kept.extend(errors)
        guest.close()
        host.close()

    for _ in range(3):
        once()
    eventually(lambda: leaks()["threads"] == 0)
    before = leaks()
    for _ in range(10):
        once()
    eventually(lambda: leaks()["threads"] == 0)
    eventually(lambda: leaks()["fds"] <= before["fds"] and leaks()["tasks"] <= before["tasks"], 10)


def test_a_worker_that_joins_a_stopped_trainer_is_free_again():
    """The others had not come yet: it waited in torch for a store that does not answer."""
    code = """
import time
from streamer.transport.lifeline import Lifeline
lifeline = Lifeline.host("127.0.0.1")
print(lifeline.port, flush=True)
time.sleep(60)
"""
    with running(code) as trainer:
        worker = WorkerLifeline.join("127.0.0.1", int(trainer.stdout.readline()), 10)
        transport = GlooTransport(worker, 1, 3)
        worker.watch(1, transport.abort)
        threading.Timer(0.5, trainer.send_signal, [signal.SIGSTOP]).start()
        started = time.monotonic()
        with pytest.raises(TransportError, match="was silent for 5 s"):
            transport.connect(60)
        transport.close()
        worker.close()
        assert time.monotonic() - started < 12


@pytest.mark.parametrize("defaults", ["dtype(torch.bfloat16)", "dtype(torch.float64)"])
def test_the_default_dtype_is_no_part_of_the_wire(defaults):
    """Gloo ends a process that is sent another size than it expects, and here two are."""
    code = """
import sys, torch
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline
torch.set_default_DEFAULTS
host = Lifeline.host("127.0.0.1")
print(host.port, flush=True)
transport = GlooTransport(host, 0, 2)
transport.connect(30)
transport.broadcast(torch.ones(4, dtype=torch.uint8), 30)
print("sent", flush=True)
"""
    with running(code.replace("DEFAULTS", defaults)) as trainer:
        worker = WorkerLifeline.join("127.0.0.1", int(trainer.stdout.readline()), 10)
        worker.report(1)
        transport = GlooTransport(worker, 1, 2)
        transport.connect(30)
        got = torch.zeros(4, dtype=torch.uint8)
        transport.broadcast(got, 30)
        assert got.tolist() == [1, 1, 1, 1]
        assert trainer.stdout.readline() == "sent\n"
        transport.close()
        worker.close()


def test_a_process_can_end_with_an_operation_that_is_stuck(group):
    """Nothing of ours keeps a trainer that has given up from exiting."""
    code = """
import threading
from streamer.transport.lifeline import Lifeline
host = Lifeline.host("127.0.0.1")
print(host.port, flush=True)
transport = GlooTransport(host, 0, 2, operation_timeout=60)
transport.connect(30)
try:
    transport.broadcast(torch.zeros(64 << 20), 0.5)
except StreamerError as error:
    print(type(error).__name__, flush=True)
transport.close()
host.close()
print([thread.name for thread in threading.enumerate()], flush=True)
"""
    head = WORKER.partition("rank, world_size")[0]
    trainer = subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True
    )
    worker = None
    try:
        port = trainer.stdout.readline().strip()
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER + "time.sleep(60)", "1", "2", port],
            stdout=subprocess.DEVNULL,
        )
        assert trainer.stdout.readline() == "DeadlineExceeded\n"
        assert trainer.stdout.readline() == "['MainThread', 'streamer-gloo']\n"
        assert trainer.wait(10) == 0
    finally:
        for process in (trainer, worker):
            if process is not None:
                process.kill()
                process.wait()
        trainer.stdout.close()


AT_EXIT = """
import datetime, threading, time
from streamer.transport import gloo
from streamer.transport.lifeline import Lifeline
store = Lifeline.host("127.0.0.1").store
inside = threading.Event()

class Stuck:
    def is_completed(self):  # stays in torch for a while
        inside.set()
        try:
            store.wait(["never"], datetime.timedelta(seconds=0.2))
        except RuntimeError:
            return False

class Late:
    def __init__(self):
        self.sleep = time.sleep
    def __del__(self):  # the interpreter is past its threads
        self.sleep(0.5)

late = Late()
threading.Thread(target=gloo._drop_when_done, args=([None, Stuck()],), daemon=True).start()
inside.wait()
"""


def test_a_process_that_ends_does_not_meet_the_thread_that_waits():
    """A call of torch's that comes back then, on a daemon thread, aborts the process."""
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, env=env
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_worker_that_is_stopped_for_a_while_goes_on(group):
    """Slow is not dead: nothing is given up before the deadline."""
    transport = group.start(f"tell(receive(torch.uint8, ({LARGE},)))")
    group.join()
    pid = group.workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    thread, errors = in_thread(
        lambda: transport.broadcast(torch.zeros(LARGE, dtype=torch.uint8), 30)
    )
    time.sleep(1)
    assert thread.is_alive()
    os.kill(pid, signal.SIGCONT)
    thread.join(20)
    assert errors == []
    assert len(group.said()) == 66
