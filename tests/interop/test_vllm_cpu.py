"""The whole way to real vLLM servers; what they serve is held against servers loaded from disk.

Every test finds a server that serves the checkpoint ``a``; see conftest.py. Slow: minutes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import streamer
from streamer import session as session_module
from streamer.doctor import examine
from streamer.drivers.mark import INCOMPLETE
from streamer.events import ChunkSent
from streamer.options import Options
from streamer.receiver import OCCUPIED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BUFFER_SIZE = 20_000
"""Each matrix of a checkpoint is a chunk of its own: more chunks than can be read ahead, by far."""
GRACE_SECONDS = 10.0
"""Within which a server must have noticed that its trainer is dead."""


class Raising(streamer.WeightSource):
    """Another source, up to the tensor ``at``."""

    def __init__(self, inner: streamer.WeightSource, at: int) -> None:
        self._inner = inner
        self._at = at

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return self._inner.specs()

    def __iter__(self) -> Iterator[tuple[str, streamer.Payload]]:
        for index, pair in enumerate(self._inner):
            if index == self._at:
                raise OSError("the disk is on fire")
            yield pair


class Renamed(streamer.WeightSource):
    """Another source, where the tensor in the middle goes by the name ``name``."""

    def __init__(self, inner: streamer.WeightSource, name: str) -> None:
        self._inner = inner
        self._specs = list(inner.specs())
        middle = len(self._specs) // 2
        self._specs[middle] = replace(self._specs[middle], name=name)

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, streamer.Payload]]:
        for spec, (_, payload) in zip(self._specs, self._inner, strict=True):
            yield spec.name, payload


@pytest.fixture
def b(checkpoints):
    """The checkpoint ``b``, opened, for a source that wraps it."""
    source = streamer.open_source(checkpoints["b"])
    yield source
    source.close()


def check_mixture(error, server):
    held = str(error.held[server.url])
    assert "mixture" in held
    assert held.endswith("push again"), held
    check_incomplete(server)


def check_incomplete(server):
    """It holds a mixture: it says so, and answers no request with it."""
    assert server.paused
    assert server.weight_version.startswith(INCOMPLETE)


def check_repaired_by_push(server, checkpoints, from_disk):
    streamer.push(checkpoints["b"], to=server.url, weight_version="repaired")
    check_serves(server, from_disk["b"], "repaired")


def check_serves(server, facts, weight_version):
    assert not server.paused
    assert server.weight_version == weight_version
    assert server.facts() == facts


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
def test_push_while_serving(server, traffic, checkpoints, from_disk, packed):
    """Requests sent during a push are answered with the new weights, and none fails."""

    def on_event(event):
        # The server is paused by the time the last chunk is read: not all fit into the buffers.
        if isinstance(event, ChunkSent) and event.bytes == event.total_bytes:
            for _ in range(3):
                traffic.ask()
            time.sleep(0.3)

    with traffic:
        traffic.wait_for_more(1)
        report = streamer.push(
            checkpoints["b"],
            to=server.url,
            weight_version="b",
            packed=packed,
            buffer_size=BUFFER_SIZE,
            on_event=on_event,
        )
        traffic.wait_for_more(2)

    assert report.chunks > 10
    assert traffic.answers[0] == from_disk["a"].token_ids[0]
    during = {answer.result() for answer in traffic.extra}
    assert during == {from_disk["b"].token_ids[0]}
    assert traffic.answers[-1] == from_disk["b"].token_ids[0]
    check_serves(server, from_disk["b"], "b")


def test_two_syncs_and_a_second_session(server, checkpoints, from_disk):
    with streamer.connect(server.url) as session:
        session.push(checkpoints["b"], weight_version="first")
        check_serves(server, from_disk["b"], "first")
        session.push(checkpoints["a"], weight_version="second")
        check_serves(server, from_disk["a"], "second")
    with streamer.connect(server.url, packed=False) as session:
        session.push(checkpoints["b"], weight_version="third")
        check_serves(server, from_disk["b"], "third")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
def test_an_arrival_is_proven(server, checkpoints, from_disk, packed):
    """Every worker of the real engine tells the digest of what it received."""
    options = {"verify": True, "packed": packed, "buffer_size": BUFFER_SIZE}
    report = streamer.push(checkpoints["b"], to=server.url, weight_version="b", **options)
    assert [item.verified for item in report.servers] == ["digest"]
    assert report.seconds.verify > 0
    check_serves(server, from_disk["b"], "b")


def test_doctor_finds_a_real_server_fit(server, checkpoints, from_disk):
    """And leaves it as it was."""
    options = Options(buffer_size=BUFFER_SIZE, verify=True)
    source = contextlib.closing(streamer.open_source(checkpoints["b"]))
    found = {item.name: item for item in examine([server.url], options, source)}
    assert {item.status for item in found.values()} == {"ok"}, found
    assert found["backend"].text == "streamer on cpu (our own)"
    assert found["settings there"].text.startswith("torch 2.")
    assert found["complete"].text == "it serves a"
    check_serves(server, from_disk["a"], "a")


def test_source_fails_midway(server, checkpoints, from_disk, b):
    source = Raising(b, len(b.specs()) // 2)
    with pytest.raises(streamer.SourceError, match="the disk is on fire") as caught:
        streamer.push(source, to=server.url, buffer_size=BUFFER_SIZE)
    check_mixture(caught.value, server)
    check_repaired_by_push(server, checkpoints, from_disk)


def test_source_fails_at_once(server, from_disk, b):
    """No byte was sent: the old weights are served on."""
    with pytest.raises(streamer.SourceError, match="the disk is on fire") as caught:
        streamer.push(Raising(b, 0), to=server.url, buffer_size=BUFFER_SIZE)
    assert not caught.value.held
    check_serves(server, from_disk["a"], "a")


def test_model_lacks_a_tensor(server, checkpoints, from_disk, b):
    source = Renamed(b, "model.layers.0.no_such.weight")
    with pytest.raises(streamer.ServerRefused, match="no_such") as caught:
        streamer.push(source, to=server.url, buffer_size=BUFFER_SIZE)
    check_mixture(caught.value, server)
    check_repaired_by_push(server, checkpoints, from_disk)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_trainer_dies_midway(server, checkpoints, from_disk, how):
    script = Path(__file__).with_name("trainer.py")
    command = [sys.executable, script, server.url, checkpoints["b"], str(BUFFER_SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout.readline() == "midway\n"
            trainer.send_signal(how)
            died = time.monotonic()
            check_incomplete(server)
            assert time.monotonic() - died < GRACE_SECONDS
            check_repaired_by_push(server, checkpoints, from_disk)
        finally:
            trainer.kill()


class Meanwhile(streamer.WeightSource):
    """Another source, in the middle of which ``then`` begins on a thread; slow while that runs."""

    def __init__(self, inner: streamer.WeightSource, then: Callable[[], object]) -> None:
        self._inner = inner
        self.thread = threading.Thread(target=then, daemon=True)

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return self._inner.specs()

    def __iter__(self) -> Iterator[tuple[str, streamer.Payload]]:
        middle = len(self.specs()) // 2
        for index, pair in enumerate(self._inner):
            if index == middle:
                self.thread.start()
            if index >= middle and self.thread.is_alive():
                time.sleep(1)  # vLLM asks the trainer, between two calls, for two seconds
            yield pair


def test_who_comes_in_the_middle_of_a_sync_is_not_let_in(
    server, checkpoints, from_disk, b, monkeypatch
):
    plain = session_module.make_plan
    monkeypatch.setattr(
        session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=BUFFER_SIZE)
    )
    refused: list[streamer.StreamerError] = []

    def second() -> None:
        try:
            streamer.push(checkpoints["a"], to=server.url, buffer_size=BUFFER_SIZE)
        except streamer.StreamerError as error:
            refused.append(error)

    source = Meanwhile(b, second)
    streamer.push(source, to=server.url, buffer_size=BUFFER_SIZE, weight_version="first")
    source.thread.join(60)
    assert [type(error) for error in refused] == [streamer.ServerRefused]
    assert OCCUPIED in str(refused[0])
    check_serves(server, from_disk["b"], "first")


def test_refused_before_the_server_is_touched(server, from_disk, b):
    twice = Renamed(b, b.specs()[0].name)
    with pytest.raises(streamer.PlanError, match="twice"):
        streamer.push(twice, to=server.url)
    check_serves(server, from_disk["a"], "a")
    with pytest.raises(streamer.IncompatibleServer, match="nccl engine cannot receive on a CPU"):
        streamer.push(b, to=server.url, backend="nccl")
    check_serves(server, from_disk["a"], "a")
