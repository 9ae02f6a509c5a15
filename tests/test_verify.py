"""Proof of arrival: what honest servers answer, and every way in which one may lie."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

import streamer
from kit_checks import all_told
from streamer import (
    IncompatibleServer,
    Session,
    StreamerError,
    Timeouts,
    TransportError,
    VerificationError,
    group,
    rendezvous,
)
from streamer import session as session_module
from streamer.drivers.mark import INCOMPLETE
from streamer.receiver import endpoint as endpoint_module
from streamer.receiver.endpoint import Endpoint, InitInfo
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_threads_left")]

TIMEOUTS = Timeouts(connect=30, progress=20)
both_modes = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


def weights(seed, count=12, size=500):
    """Tensors whose bytes depend on ``seed``, one larger than what a digest collects first."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"w{i}": torch.randn(size, generator=generator).bfloat16() for i in range(count)}
    made["large"] = torch.randn(700, 501, generator=generator)
    made["odd"] = torch.arange(seed, seed + 7, dtype=torch.uint8)
    made["none"] = torch.zeros(0, 4)
    return made


@pytest.fixture
def session():
    """Sessions that verify, closed at the end of the test."""
    made: list[Session] = []

    def make(*servers, **options):
        options = {"timeouts": TIMEOUTS, "buffer_size": 2000, "verify": True, **options}
        made.append(streamer.connect([server.url for server in servers], **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# Our engine: every worker tells a digest.


@both_modes
def test_an_arrival_is_proven_and_reported(session, server, make_source, packed):
    one = session(server, packed=packed)
    for step in range(3):
        report = one.push(make_source(weights(step)))
        assert server.holds(weights(step))
        assert [item.verified for item in report.servers] == ["digest"]
        assert 0 < report.seconds.verify < report.seconds.total
        (said,) = report.as_json()["servers"]
        assert said["verified"] == "digest"


def test_of_every_worker_of_every_server(session, server, other_server, make_source):
    report = session(server, other_server).push(make_source(weights(1)))
    assert [item.verified for item in report.servers] == ["digest", "digest"]


def test_of_every_call(session, server, make_source, monkeypatch):
    plain = session_module.make_plan
    monkeypatch.setattr(session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=4000))
    one = session(server)
    server.heal()
    report = one.push(make_source(weights(1)))
    assert server.calls.count("POST /update_weights") > 2
    assert report.servers[0].verified == "digest"


def test_without_verify_nothing_is_said(session, server, make_source):
    report = session(server, verify=False).push(make_source(weights(1)))
    assert report.servers[0].verified is None
    assert report.seconds.verify == 0


def test_what_was_not_sent_is_not_proven(session, server, make_source):
    one = session(server)
    source = make_source(weights(1), weight_version="commit-1")
    assert one.push(source).servers[0].verified == "digest"
    report = one.push(source)
    assert report.tensors == 0
    assert report.servers[0].verified is None


def test_a_source_that_fails_is_still_what_is_told(session, server, make_source):
    """What goes out as filler arrives as filler: the digests agree, the weights are no good."""

    def fail(index):
        if index == 8:
            raise OSError("disk on fire")

    one = session(server)
    with pytest.raises(StreamerError, match="disk on fire"):
        one.push(make_source(weights(1), on_step=fail))
    assert one.push(make_source(weights(2))).servers[0].verified == "digest"


class Skips(GlooTransport):
    """A worker that takes part in nothing."""

    def _broadcast(self, tensor, timeout):
        pass


class Drops(GlooTransport):
    """A worker that takes part in every broadcast and keeps none: its buffer stays as it was."""

    def _broadcast(self, tensor, timeout):
        super()._broadcast(torch.empty_like(tensor), timeout)


class Spoils(GlooTransport):
    """One bit of the second call is another."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.spoils = 4

    def _broadcast(self, tensor, timeout):
        super()._broadcast(tensor, timeout)
        self.spoils -= 1
        if self.spoils == 0:
            tensor.view(-1).view(torch.uint8)[3] ^= 1


class Liar:
    """A server with our engine in this process; it answers 200 to all, whatever its workers do.

    ``transports`` has one class a worker.
    """

    def __init__(self, fake, reply, transports):
        self.url = fake.url
        self.endpoints = [Endpoint(torch.device("cpu"), n) for n in range(len(transports))]
        self.transports = transports
        self.weight_version, self.paused = "default", False
        self.tells = True
        routes = {
            "GET /version": lambda body: {"version": "0.33.0"},
            "GET /get_world_size": lambda body: {"world_size": len(transports)},
            "GET /server_info": lambda body: {
                "vllm_config": {
                    "weight_transfer_config": {"backend": "streamer"},
                    "device_config": {"device": "cpu"},
                }
            },
            "GET /weight_info": lambda body: {"weight_version": self.weight_version},
            "GET /is_paused": lambda body: {"is_paused": self.paused},
            "POST /pause": lambda body: self.set(paused=True),
            "POST /resume": lambda body: self.set(paused=False),
            "POST /update_weight_version": lambda body: self.set(
                weight_version=body["new_version"]
            ),
            "POST /start_weight_update": lambda body: {},
            "POST /finish_weight_update": lambda body: self.set(
                weight_version=body["weight_version"] or self.weight_version
            ),
            "POST /reset_prefix_cache": lambda body: {},
            "POST /init_weight_transfer_engine": self.join,
            "POST /update_weights": self.update,
            "POST /shutdown_weight_transfer_engine": self.leave,
        }

        def route(step):
            return lambda handler: reply(step(handler.call.body))(handler)

        fake.routes.update({name: route(step) for name, step in routes.items()})

    def set(self, **values):
        self.__dict__.update(values)
        return {}

    def each(self, step):
        threads = [
            threading.Thread(target=step, args=(number, end))
            for number, end in enumerate(self.endpoints)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    def join(self, body):
        info = InitInfo.parse(body["init_info"])

        def step(number, end):
            end.join(info, update_open=False)
            # Same group, same life, other manners.
            end._transport.__class__ = self.transports[number]
            end._transport.spoils = 4

        return self.each(step)

    def update(self, body):
        info = dict(body["update_info"])
        if not self.tells:
            info.pop("verify")

        def step(number, end):
            end.receive(info, lambda n: torch.zeros(n, dtype=torch.uint8), lambda chunk: None)

        return self.each(step)

    def leave(self, body=None):
        return self.each(lambda number, end: end.leave())


@pytest.fixture
def liar(fake_server, reply):
    made: list[Liar] = []

    def make(*transports):
        made.append(Liar(fake_server, reply, transports))
        return made[-1]

    yield make
    for one in made:
        one.leave()


def check_incomplete(server, error):
    assert "marked incomplete and left paused" in all_told(error)[server.url]
    assert server.paused
    assert server.weight_version.startswith(f"{INCOMPLETE}v2#")


@both_modes
def test_a_worker_that_keeps_nothing_is_found_and_named(liar, session, make_source, packed):
    server = liar(GlooTransport, Drops)
    one = session(server, packed=packed)
    started = time.monotonic()
    with pytest.raises(VerificationError) as caught:
        one.push(make_source(weights(1)), weight_version="v2")
    assert time.monotonic() - started < 10
    text = str(caught.value.args[0])
    assert text.startswith(f"{server.url}, worker 1 (rank 2) received ")
    received, sent = re.findall(r"\b[0-9a-f]{16}\b", text)
    assert received != sent
    assert "call 1 of 1" in text
    assert "restart it and push again" in text
    check_incomplete(server, caught.value)


def test_a_server_that_became_honest_is_repaired(liar, session, make_source):
    server = liar(Drops)
    one = session(server)
    with pytest.raises(VerificationError):
        one.push(make_source(weights(1)), weight_version="v2")
    server.endpoints[0]._transport.__class__ = GlooTransport
    report = one.push(make_source(weights(1)))
    assert report.servers[0].verified == "digest"
    assert not server.paused


def test_several_that_keep_nothing_are_counted(liar, session, make_source):
    one = session(liar(Drops, Drops))
    with pytest.raises(VerificationError, match=r"and 1 more of its group"):
        one.push(make_source(weights(1)))


def test_a_flipped_bit_is_found_in_its_call(liar, session, make_source, monkeypatch):
    plain = session_module.make_plan
    monkeypatch.setattr(session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=4000))
    server = liar(Spoils)
    with pytest.raises(VerificationError, match=r"for call 2 of \d") as caught:
        session(server).push(make_source(weights(1)), weight_version="v2")
    check_incomplete(server, caught.value)


@pytest.mark.parametrize("verify", [True, False])
def test_a_server_that_answers_and_takes_no_byte_does_not_hang(
    liar, session, make_source, verify, monkeypatch
):
    """A communicator that skips every broadcast: nothing was received, and every call is a 200."""
    monkeypatch.setattr(group, "_UNTAKEN_SECONDS", 1.0)
    server = liar(Skips)
    one = session(server, verify=verify)
    started = time.monotonic()
    with pytest.raises(TransportError, match="not taken all bytes") as caught:
        one.push(make_source(weights(1)), weight_version="v2")
    assert time.monotonic() - started < 10
    check_incomplete(server, caught.value)


def test_an_engine_that_tells_no_digest_is_named(liar, session, make_source):
    server = liar(GlooTransport)
    server.tells = False
    started = time.monotonic()
    with pytest.raises(VerificationError) as caught:
        session(server).push(make_source(weights(1)), weight_version="v2")
    assert 4 < time.monotonic() - started < 15
    text = str(caught.value.args[0])
    assert text.startswith(f"{server.url}, worker 0 (rank 1) answered call 1 of 1, and told no ")
    assert "install this version of streamer beside it" in text
    check_incomplete(server, caught.value)


def test_a_trainer_without_a_lifeline_cannot_ask():
    end = Endpoint(torch.device("cpu"), 0)
    end._transport, end._info = Nowhere(torch.device("cpu"), 0, 1), object()
    with pytest.raises(StreamerError, match="verify needs the master_address"):
        end.receive({"verify": 1}, lambda n: pytest.fail("allocated"), lambda chunk: None)


# vLLM's own engine: its checksums, before and after.


class Nowhere(Transport):
    """A rank 0 whose bytes nobody gets."""

    def __init__(self, device, rank, world_size, lifeline=None):
        super().__init__(torch.device("cpu"), rank, world_size)

    def rendezvous(self):
        return {"nccl_unique_id_b64": "x"}

    def connect(self, timeout):
        pass

    def _broadcast(self, tensor, timeout):
        pass

    def _abort(self):
        pass

    def close(self):
        self.abort("closed")


class PlainVllm(Liar):
    """A server with vLLM's own engine. ``holds`` is what its checksums are made of."""

    def __init__(self, fake, reply, version="0.33.0"):
        super().__init__(fake, reply, [None])
        self.holds = "dummy weights"
        self.arrives = True
        self.asked = 0
        config = {
            "weight_transfer_config": {"backend": "nccl"},
            "device_config": {"device": "cuda"},
        }
        fake.routes["GET /version"] = reply({"version": version})
        fake.routes["GET /server_info"] = reply({"vllm_config": config})
        fake.routes["POST /weight_checker"] = lambda handler: reply(self.check())(handler)

    def check(self):
        self.asked += 1
        return {"checksums": {"tp0:w": self.holds}}

    def join(self, body):
        return {}

    def update(self, body):
        if self.arrives:
            self.holds = self.coming
        return {}

    def leave(self, body=None):
        return {}


@pytest.fixture
def plain(fake_server, reply, monkeypatch):
    monkeypatch.setattr(rendezvous, "NcclTransport", Nowhere)
    monkeypatch.setattr(rendezvous, "sending_device", lambda options: torch.device("cuda:0"))
    return PlainVllm(fake_server, reply)


@pytest.fixture
def push(session, plain, make_source):
    """Push weights to a plain vLLM in one session; what the report says of their arrival."""
    one = session(plain)

    def push(seed, names=None):
        plain.coming = f"weights {seed}"
        tensors = weights(seed)
        chosen = {name: tensors[name] for name in names or tensors}
        report = one.push(make_source(chosen), weight_version=f"v{seed}")
        assert not plain.paused
        assert plain.weight_version == f"v{seed}"
        return report.servers[0].verified

    return push


def test_checksums_that_change_show_an_arrival(push, plain):
    assert push(1) == "changed"
    assert push(2) == "changed"
    assert plain.asked == 4


def test_the_same_weights_again_are_not_proven_and_no_error(push, plain):
    assert push(1) == "changed"
    assert push(1) == "not proven"
    assert push(1) == "not proven"
    assert push(2) == "changed"


def test_a_server_that_had_the_weights_already_is_not_proven(push, plain):
    plain.holds = "weights 1"
    assert push(1) == "not proven"
    assert push(2) == "changed"


@pytest.mark.parametrize("first_arrives", [True, False])
def test_other_weights_that_change_nothing_are_an_error(push, plain, first_arrives):
    """A server that answers 200 while its communicator is disabled: the second sync shows it."""
    plain.arrives = first_arrives
    assert push(1) == ("changed" if first_arrives else "not proven")
    plain.arrives = False
    with pytest.raises(VerificationError) as caught:
        push(2)
    text = str(caught.value.args[0])
    assert text.startswith(f"{plain.url} holds the same weights as before, though others were sent")
    then, now = re.findall(r"\b[0-9a-f]{16}\b", text)
    assert then != now
    assert "look for NCCL errors in its log and restart it" in text
    assert all_told(caught.value)[plain.url].endswith("left paused: restart it")
    assert plain.paused
    assert plain.weight_version.startswith(f"{INCOMPLETE}v2#")


def test_a_part_of_the_weights_may_change_nothing(push, plain):
    """Sent were other tensors: these may well be the ones that it holds."""
    assert push(1) == "changed"
    assert push(1, names=["w0", "w1"]) == "not proven"
    plain.holds = "what somebody else has pushed"
    plain.arrives = False
    assert push(3, names=["w0", "w1"]) == "not proven"


def test_a_server_that_holds_a_mixture_is_not_asked_first(push, plain):
    """Its layers may have no memory."""
    plain.weight_version = f"{INCOMPLETE}of-another"
    before = plain.asked
    assert push(1) == "not proven"
    assert plain.asked == before + 1


def test_a_vllm_without_a_checker_is_refused_before_anything_changes(
    session, fake_server, reply, plain, make_source
):
    fake_server.routes["GET /version"] = reply({"version": "0.31.2"})
    one = session(plain)
    fake_server.calls.clear()
    with pytest.raises(IncompatibleServer, match=r"0\.31\.2.* upgrade it, use the streamer back"):
        one.push(make_source(weights(1)))
    assert fake_server.posts == []


@pytest.mark.parametrize("content", [{}, {"checksums": None}, {"checksums": []}])
def test_a_checker_that_answers_something_else(
    session, fake_server, reply, plain, make_source, content
):
    fake_server.routes["POST /weight_checker"] = reply(content)
    one = session(plain)
    with pytest.raises(IncompatibleServer, match="weight_checker answered no checksums"):
        one.push(make_source(weights(1)))
    assert not plain.paused
    assert plain.weight_version == "default"


def test_the_stub_is_what_the_endpoint_makes():
    """The liars change the class of what `Endpoint` has joined: it must be this one."""
    assert endpoint_module.GlooTransport is GlooTransport
