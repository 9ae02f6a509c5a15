"""The store that a trainer hosts and workers watch. The trainers here are real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from streamer import DeadlineExceeded, TransportError
from streamer.transport import store
from streamer.transport import worker_lifeline as module
from streamer.transport.lifeline import Lifeline, worker_key
from streamer.transport.worker_lifeline import WorkerLifeline

pytestmark = pytest.mark.timeout(60)

TRAINER = """
import ctypes, sys
from streamer.transport.lifeline import Lifeline
lifeline = Lifeline.host("127.0.0.1")
print(lifeline.port, flush=True)
for line in sys.stdin:
    if line == "sync\\n":
        lifeline.tell_syncing(True)
    if line == "close\\n":
        lifeline.close()
    if line == "close while held\\n":
        held = lifeline.store
        lifeline.close()
    if line == "call the roll\\n":
        lifeline.call_roll([1])
        print("done", lifeline.absent([1], 5, lambda: None), sep="\\n", flush=True)
        continue
    if line == "hold the GIL\\n":
        ctypes.PyDLL(None).sleep(3)
    print("done", flush=True)
"""


class Trainer:
    """A process that hosts a lifeline and does what it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.process.stdout.readline())

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> None:
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def trainer():
    started = Trainer()
    yield started
    started.end()


@pytest.fixture
def quick(monkeypatch):
    """Ask and listen in a hurry."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(module, "_MISSED_BEATS", 9)


@pytest.fixture
def watched(trainer):
    """A worker's end that watches; what it was told, and when."""
    worker = WorkerLifeline.join("127.0.0.1", trainer.port, 20)
    told: list[tuple[float, str]] = []
    worker.watch(1, lambda reason: told.append((time.monotonic(), reason)))
    time.sleep(2 * module.BEAT_SECONDS)
    assert told == []
    yield worker, told
    worker.close()


def told_within(told, seconds):
    deadline = time.monotonic() + seconds
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    assert told, f"not told within {seconds} s"
    return told[0][1]


def test_a_port_that_is_taken_is_named():
    """Case 39."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TransportError) as caught:
            Lifeline.host("127.0.0.1", port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "give another port, or 0 for a free one"
    )


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign"):
        Lifeline.host("192.0.2.1")


def test_the_port_that_is_asked_for_is_taken(free_port):
    port = free_port()
    lifeline = Lifeline.host("127.0.0.1", port)
    assert lifeline.port == port
    assert lifeline.rendezvous() == {"master_address": "127.0.0.1", "master_port": port}
    lifeline.close()
    Lifeline.host("127.0.0.1", port).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this host")
def test_ipv6():
    try:
        host = Lifeline.host("::1")
    except TransportError:
        pytest.skip("no IPv6 loopback on this host")
    worker = WorkerLifeline.join("::1", host.port, 10)
    worker.report(1, here=True)
    assert worker.local_address == "::1"
    assert host.reported(1) == {"here": True}
    worker.close()
    host.close()


def test_no_trainer_is_an_error_at_once(free_port):
    port = free_port()
    started = time.monotonic()
    with pytest.raises(TransportError) as caught:
        WorkerLifeline.join("127.0.0.1", port, 30)
    assert time.monotonic() - started < 5
    assert str(caught.value).startswith(f"the trainer does not answer at 127.0.0.1:{port}: ")
    assert "Connection refused" in str(caught.value)
    assert str(caught.value).endswith("can this host reach it there?")


def test_a_trainer_that_says_nothing_ends_at_the_deadline():
    """Something listens there, but it is no store."""
    errors: list[TransportError] = []

    def join():
        try:
            WorkerLifeline.join("127.0.0.1", port, 1)
        except TransportError as error:
            errors.append(error)

    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(6)
        late = thread.is_alive()
    thread.join(10)  # closing the listener has reset its connection
    assert not late, "still waiting after 6 s, with a timeout of 1 s"
    assert f"does not answer at 127.0.0.1:{port}" in str(errors[0])


def test_joining_has_one_deadline_for_all_its_connections(monkeypatch, leaks, eventually):
    plain = store.TCPStore

    def slow(*args, **options):
        time.sleep(0.8)
        return plain(*args, **options)

    host = Lifeline.host("127.0.0.1")
    monkeypatch.setattr(store, "TCPStore", slow)
    started = time.monotonic()
    with pytest.raises(TransportError, match="no answer within 1 s"):
        WorkerLifeline.join("127.0.0.1", host.port, 1)
    assert time.monotonic() - started < 1.5
    eventually(lambda: leaks()["threads"] == 0)
    host.close()


def test_a_trainer_that_leaves_while_a_worker_joins_is_no_wait():
    """A worker that waits for it answers nobody else, and the next sync would wait with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def leave():
            with listener.accept()[0]:
                listener.close()

        thread = threading.Thread(target=leave)
        thread.start()
        started = time.monotonic()
        with pytest.raises(TransportError, match=f"does not answer at 127.0.0.1:{port}"):
            WorkerLifeline.join("127.0.0.1", port, 30)
        assert time.monotonic() - started < 5
        thread.join()


def test_workers_report_to_the_trainer(eventually):
    host = Lifeline.host("127.0.0.1")
    worker = WorkerLifeline.join("127.0.0.1", host.port, 10)
    assert host.reported(1) == {}
    worker.report(1, update_open=True)
    eventually(lambda: host.reported(1) == {"update_open": True})
    worker.report(1, update_open=False, text="ü")
    eventually(lambda: host.reported(1) == {"update_open": False, "text": "ü"})
    host.wait_for_workers(2, 0.1, lambda: None)
    worker.close()
    host.close()


def test_the_ranks_that_did_not_come_are_named():
    host = Lifeline.host("127.0.0.1")
    host.store.set(worker_key(2), "{}")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        host.wait_for_workers(5, 0.3, lambda: None)
    assert 0.25 < time.monotonic() - started < 5
    assert str(caught.value) == (
        f"of 4 workers, ranks [1, 3, 4] have not joined 127.0.0.1:{host.port} within 0.3 s"
    )
    host.close()


def test_waiting_for_workers_can_be_stopped():
    host = Lifeline.host("127.0.0.1")
    stop = threading.Event()

    def check():
        if stop.is_set():
            raise TransportError("stopped")

    timer = threading.Timer(0.2, stop.set)
    timer.start()
    started = time.monotonic()
    with pytest.raises(TransportError, match="stopped"):
        host.wait_for_workers(2, 60, check)
    assert time.monotonic() - started < 5
    timer.join()
    host.close()


def test_a_trainer_that_is_killed_is_noticed(trainer, watched):
    _, told = watched
    killed = time.monotonic()
    trainer.process.kill()
    reason = told_within(told, 10)
    assert told[0][0] - killed < 3
    assert reason == f"the trainer at 127.0.0.1:{trainer.port} is gone"
    time.sleep(0.5)
    assert len(told) == 1, "told once"


def test_a_trainer_that_is_stopped_is_noticed(trainer, watched):
    """Its kernel still acknowledges: only silence tells."""
    _, told = watched
    stopped = time.monotonic()
    os.kill(trainer.process.pid, signal.SIGSTOP)
    try:
        told_within(told, 20)
        assert told[0][0] - stopped < 10
    finally:
        os.kill(trainer.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["close", "close while held"])
def test_a_trainer_that_closes_is_noticed(quick, trainer, watched, how):
    """Also while something else, such as a Gloo operation that hangs, keeps its store alive."""
    _, told = watched
    closed = time.monotonic()
    trainer.tell(how)
    trainer.answer()
    told_within(told, 5)
    assert told[0][0] - closed < 3


def test_a_trainer_that_is_busy_is_not_taken_for_dead(quick, trainer):
    """The store answers from a thread that needs no GIL."""
    worker = WorkerLifeline.join("127.0.0.1", trainer.port, 20)
    told: list[str] = []
    worker.watch(1, told.append)
    trainer.tell("hold the GIL")
    trainer.answer()
    assert told == []
    worker.close()


def absent(host, *ranks, timeout=5.0):
    started = time.monotonic()
    found = host.absent(ranks, timeout, lambda: None)
    return list(found), time.monotonic() - started


def test_workers_answer_the_roll_at_once():
    host = Lifeline.host("127.0.0.1")
    workers = [WorkerLifeline.join("127.0.0.1", host.port, 10) for _ in range(2)]
    for rank, worker in enumerate(workers, 1):
        worker.report(rank)
        worker.watch(rank, lambda reason: None)
    for _ in range(20):
        host.call_roll([1, 2])
        found, seconds = absent(host, 1, 2)
        assert found == []
        assert seconds < 1
    workers[1]._watched_for = None  # as one that was killed: without a word
    workers[1].close()
    host.call_roll([1, 2])
    found, seconds = absent(host, 1, 2, timeout=0.5)
    assert found == [2]
    assert 0.4 < seconds < 3
    host.store.set(worker_key(2), '{"left": true}')
    host.call_roll([1, 2])
    found, seconds = absent(host, 1, 2)
    assert found == [2]
    assert seconds < 1, "one that has said that it left is not waited for"
    workers[0].close()
    host.close()


def test_a_worker_that_leaves_says_so(eventually):
    host = Lifeline.host("127.0.0.1")
    stays, leaves = (WorkerLifeline.join("127.0.0.1", host.port, 10) for _ in range(2))
    stays.watch(1, lambda reason: None)
    leaves.watch(2, lambda reason: None)
    assert not host.left([1, 2])
    leaves.close()
    eventually(lambda: host.left([1, 2]))
    assert not host.left([1])
    stays.close()
    host.close()


@pytest.mark.parametrize("end", ["close", "kill", "stop"])
def test_whether_a_sync_is_under_way(quick, trainer, watched, end):
    worker, _ = watched
    assert not worker.is_syncing()
    trainer.tell("sync")
    trainer.answer()
    assert worker.is_syncing()
    if end == "close":
        trainer.tell("close")
    else:
        trainer.process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGSTOP)
    started = time.monotonic()
    assert not worker.is_syncing(), "a trainer that is gone keeps nobody out"
    assert time.monotonic() - started < 4 * module.BEAT_SECONDS


def test_a_forked_process_lets_the_port_go():
    """Or a loader of data that lives on would keep it from the next session of this trainer."""
    host = Lifeline.host("127.0.0.1")
    (reads, writes), (heard, forked) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.write(forked, b"!")
        os.read(reads, 1)  # until the parent has seen it
        os._exit(0)
    try:
        os.read(heard, 1)
        host.close()
        again = Lifeline.host("127.0.0.1", host.port)
        again.close()
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        for end in (reads, heard, forked):
            os.close(end)


def test_a_roll_call_after_the_close_is_an_error_of_the_transport():
    """Another thread may close it at any moment."""
    lifeline = Lifeline.host("127.0.0.1")
    lifeline.close()
    for late in (
        lambda: lifeline.call_roll([1]),
        lambda: lifeline.absent([1], 5, lambda: None),
        lambda: lifeline.reported(1),
        lambda: lifeline.wait_for_workers(2, 5, lambda: None),
    ):
        with pytest.raises(TransportError, match=r"^broadcast group: closed$"):
            late()
    lifeline.close()


def test_a_wait_for_the_absent_can_be_stopped():
    host = Lifeline.host("127.0.0.1")

    def check():
        raise TransportError("stopped")

    host.call_roll([1])
    with pytest.raises(TransportError, match="stopped"):
        host.absent([1], 60, check)
    host.close()


def test_a_trainer_that_was_stopped_finds_that_its_worker_has_left(trainer, eventually):
    """It looks as soon as it goes on."""
    worker = WorkerLifeline.join("127.0.0.1", trainer.port, 20)
    worker.report(1)
    told: list[str] = []
    worker.watch(1, told.append)
    trainer.tell("call the roll")
    trainer.answer()
    assert trainer.process.stdout.readline() == "[]\n"
    os.kill(trainer.process.pid, signal.SIGSTOP)
    eventually(lambda: told, 20)
    trainer.tell("call the roll")
    os.kill(trainer.process.pid, signal.SIGCONT)
    resumed = time.monotonic()
    trainer.answer()
    assert trainer.process.stdout.readline() == "[1]\n"
    assert time.monotonic() - resumed < 2
    worker.close()


AT_EXIT = """
import time
from streamer.transport.lifeline import Lifeline
from streamer.transport.worker_lifeline import WorkerLifeline
host = Lifeline.host("127.0.0.1")
worker = WorkerLifeline.join("127.0.0.1", host.port, 10)
worker.report(1)
worker.watch(1, print)

class Late:
    def __init__(self):
        self.host, self.sleep = host, time.sleep
    def __del__(self):  # the interpreter is past its threads
        self.host.store.set("streamer/call/1", "1")
        self.sleep(0.3)

late = Late()
"""


def test_a_worker_may_exit_while_it_is_called():
    """A call of torch's that comes back then, on a daemon thread, aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FORKED = """
import os, sys
from streamer.transport.lifeline import Lifeline
from streamer.transport.worker_lifeline import WorkerLifeline
host = Lifeline.host("127.0.0.1")
worker = WorkerLifeline.join("127.0.0.1", host.port, 10)
worker.report(1)
worker.watch(1, print)
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
host.call_roll([1])
print(host.absent([1], 5, lambda: None))
"""


def test_a_fork_that_exits_does_not_leave():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


WORKER = """
import sys
from streamer.transport import worker_lifeline as module
module.BEAT_SECONDS, module._MISSED_BEATS = 0.2, 9
lifeline = module.WorkerLifeline.join("127.0.0.1", int(sys.argv[1]), 20)
lifeline.watch(1, lambda reason: print("told", flush=True))
print("watching", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_was_stopped_itself_raises_no_alarm(trainer):
    """Its own pause (a frozen host, a debugger) is not the trainer's silence."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(trainer.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout.readline() == "watching\n"
        time.sleep(0.5)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(3)
        worker.send_signal(signal.SIGCONT)
        heard, _, _ = select.select([worker.stdout], [], [], 2)
        assert not heard
        trainer.process.kill()
        heard, _, _ = select.select([worker.stdout], [], [], 5)
        assert heard, "it still watches"
    finally:
        worker.kill()
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()


def test_nothing_is_told_after_a_close(quick, trainer, watched):
    worker, told = watched
    worker.close()
    worker.close()
    trainer.process.kill()
    time.sleep(2.5)
    assert told == []


def test_the_watching_threads_end_with_it(trainer, watched, eventually):
    worker, told = watched
    ours = {"streamer-ask", "streamer-listen", "streamer-answer"}
    assert ours <= {thread.name for thread in threading.enumerate()}
    worker.close()
    eventually(lambda: not ours & {thread.name for thread in threading.enumerate()}, 3)
    assert told == []


def test_coming_and_going_leaks_nothing(leaks, eventually):
    def once():
        host = Lifeline.host("127.0.0.1")
        worker = WorkerLifeline.join("127.0.0.1", host.port, 10)
        worker.report(1)
        worker.watch(1, lambda reason: None)
        worker.close()
        host.close()

    for _ in range(3):
        once()
    eventually(lambda: leaks()["threads"] == 0)
    before = leaks()
    for _ in range(10):
        once()
    eventually(lambda: leaks()["threads"] == 0)
    eventually(lambda: leaks()["fds"] <= before["fds"] and leaks()["tasks"] <= before["tasks"], 10)


def test_a_name_server_that_loses_a_question_costs_a_second(monkeypatch):
    """torch asks it for the trainer's name when it connects, and waits for five."""
    plain, tries = store.TCPStore, []

    def stalls(*args, **options):
        tries.append(time.monotonic())
        if len(tries) == 1:
            time.sleep(4)
        return plain(*args, **options)

    host = Lifeline.host("127.0.0.1")
    monkeypatch.setattr(store, "TCPStore", stalls)
    started = time.monotonic()
    worker = WorkerLifeline.join("127.0.0.1", host.port, 30)
    assert time.monotonic() - started < 3
    worker.close()
    host.close()
