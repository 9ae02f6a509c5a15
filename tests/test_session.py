"""Whole syncs into real reference servers, and every way in which one can go wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import streamer
from streamer import (
    DeadlineExceeded,
    IncompatibleServer,
    PlanError,
    PluginError,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    Session,
    SourceError,
    SpecMismatch,
    StreamerError,
    TensorSpec,
    Timeouts,
    TransportError,
    UsageError,
    hookimpl,
    network,
    registry,
)
from streamer import group as group_module
from streamer import session as session_module
from streamer.drivers.mark import INCOMPLETE
from streamer.drivers.vllm import VllmDriver
from streamer.events import ChunkSent, SyncFailed, SyncFinished, SyncStarted
from streamer.registry import Registry
from streamer.transport.lifeline import BEAT_SECONDS
from streamer.transport.store import SILENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

TIMEOUTS = Timeouts(connect=30, progress=20)
UPDATE = "POST /update_weights"
JOIN = "POST /init_weight_transfer_engine"
MIXTURE = "holds a mixture of old and new weights, is marked incomplete and left paused: push again"

both_modes = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


def weights(seed, count=12, size=500):
    """Tensors whose bytes depend on ``seed``, of several dtypes."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e5m2]
    made = {}
    for i in range(count):
        dtype = dtypes[i % 4]
        data = torch.randint(
            0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        made[f"layers.{i}.weight"] = data.view(dtype)
    made["scale"] = torch.tensor(float(seed))
    made["none"] = torch.zeros(0, 4)
    return made


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


# What goes well.


@both_modes
def test_weights_arrive_in_every_worker(session, server, push, packed):
    one = session(server, packed=packed)
    tensors = weights(1)
    report = push(one, [server], tensors, weight_version="step-1")
    assert report.tensors == len(tensors)
    assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.chunks > 3
    assert report.weight_version == "step-1"
    (info,) = report.servers
    assert (info.url, info.world_size) == (server.url, 2)
    assert info.version.startswith("0.33.0")
    seconds = report.seconds
    assert seconds.open + seconds.connect + seconds.update + seconds.finish == pytest.approx(
        seconds.total, abs=0.01
    )
    assert report.gb_per_s > 0
    assert report.as_json()["weight_version"] == "step-1"


@both_modes
def test_several_syncs_join_once(session, server, push, packed):
    one = session(server, packed=packed)
    server.heal()
    for step in range(3):
        push(one, [server], weights(step), weight_version=f"step-{step}")
    assert JOIN not in server.calls
    assert server.calls.count(UPDATE) == 3


def test_deferred_tensors_arrive(session, server, push, make_source, deferred):
    tensors = weights(7)
    session(server).push(make_source({n: deferred(t) for n, t in tensors.items()}))
    assert server.holds(tensors)


def test_two_servers_are_one_group(session, server, other_server, push):
    """Three workers, and each byte is sent once."""
    one = session(server, other_server)
    for step in (1, 2):
        report = push(one, [server, other_server], weights(step))
    assert [(item.url, item.world_size) for item in report.servers] == [
        (server.url, 2),
        (other_server.url, 1),
    ]


def test_push_connects_and_disconnects(server, make_source):
    tensors = weights(3)
    report = streamer.push(
        make_source(tensors), server.url, timeouts=TIMEOUTS, weight_version="once"
    )
    assert server.calls[-1] == "POST /shutdown_weight_transfer_engine"
    assert report.weight_version == "once"
    assert server.holds(tensors)


def test_sessions_one_after_another_and_in_turns(session, server, push):
    """Another trainer's sync in between is noticed, and the group is joined anew."""
    first = session(server)
    push(first, [server], weights(1))
    second = session(server)
    push(second, [server], weights(2))
    push(first, [server], weights(3))
    push(second, [server], weights(4))
    first.close()
    second.close()
    push(session(server), [server], weights(5))


@pytest.mark.parametrize("how", ["joins", "is refused"])
def test_another_trainer_that_has_only_connected_is_noticed(
    session, server, other_server, push, how
):
    """The weights are what they were, but the workers have left the group."""
    first = session(server, other_server)
    push(first, [server, other_server], weights(1))
    if how == "joins":
        session(other_server)
    else:
        other_server.fail("/init_weight_transfer_engine", 500, "no")
        with pytest.raises(ServerRefused):
            session(server, other_server)
        other_server.heal()
    push(first, [server, other_server], weights(2))


def test_a_model_larger_than_a_call_is_sent_in_several(session, server, push, monkeypatch):
    plain = session_module.make_plan
    monkeypatch.setattr(session_module, "make_plan", lambda *a, **k: plain(*a, **k, call_size=4000))
    one = session(server)
    server.heal()
    push(one, [server], weights(1))
    assert server.calls.count(UPDATE) > 2
    assert server.calls.count("POST /start_weight_update") == 1


def test_close_is_idempotent_and_ends_the_membership(session, server):
    one = session(server)
    server.heal()
    one.close()
    one.close()
    assert server.calls == ["GET /weight_info", "POST /shutdown_weight_transfer_engine"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("streamer")]


def test_a_push_within_a_push_is_refused(session, server, make_source):
    inner: list[BaseException] = []

    def again(event):
        try:
            one.push(make_source(weights(2)))
        except UsageError as error:
            inner.append(error)

    one = session(server, on_event=again)
    one.push(make_source(weights(1)))
    assert "a push of this session is under way" in str(inner[0])
    assert one.push(make_source(weights(2))).tensors


def test_a_session_does_not_outlive_a_fork(session, server, make_source):
    one = session(server)
    child = os.fork()
    if child == 0:
        try:
            one.push(make_source(weights(1)))
        except UsageError as error:
            one.close()
            os._exit(7 if "before a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.push(make_source(weights(1)))


def test_a_closed_session_says_so(session, server, make_source):
    one = session(server)
    one.close()
    with pytest.raises(UsageError, match="closed"):
        one.push(make_source(weights(1)))


# The name of the weights.


def test_whose_weight_version_counts(session, server, make_source):
    one = session(server)

    def push(own, given):
        source = make_source(weights(1), weight_version=own)
        return one.push(source, weight_version=given).weight_version

    assert push(None, "mine") == server.weight_version == "mine"
    assert push("commit", "mine") == server.weight_version == "mine"
    assert push("commit", None) == server.weight_version == "commit"
    made_up = {push(None, None), push(None, None)}
    assert len(made_up) == 2
    assert all(re.fullmatch(r"streamer-[0-9a-f]{12}", name) for name in made_up)
    assert server.weight_version in made_up


def test_what_the_servers_serve_already_is_not_sent_again(session, server, push, make_source):
    one = session(server)
    source = make_source(weights(1), weight_version="commit-1")
    one.push(source)
    server.heal()
    report = one.push(source)
    assert (report.tensors, report.bytes, report.chunks) == (0, 0, 0)
    assert report.weight_version == "commit-1"
    assert UPDATE not in server.calls
    assert one.push(source, force=True).tensors == len(weights(1))
    assert UPDATE in server.calls


@pytest.mark.parametrize("again", ["the session", "another session"])
def test_a_server_that_was_left_paused_is_not_taken_for_one_that_serves(
    session, server, make_source, again
):
    """The weights had arrived, the resume failed: trying again must bring the server back."""
    one = session(server)
    one.push(make_source(weights(1)))
    source = make_source(weights(2), weight_version="commit-2")
    server.fail("/resume", 500)
    with pytest.raises(ServerRefused) as caught:
        one.push(source)
    assert caught.value.held == {
        server.url: "holds the new weights, but is marked incomplete and left paused: push again"
    }
    assert server.paused
    server.heal()
    (session(server) if again == "another session" else one).push(source)
    assert server.holds(weights(2))
    assert not server.paused


@pytest.mark.parametrize("whose", ["caller", "source"])
@pytest.mark.parametrize("version", [5, f"{INCOMPLETE}x", "held-by-user:x", "v\udc80"])
def test_a_weight_version_that_cannot_be_right(session, server, make_source, version, whose):
    """A step's number is a likely mistake, and must be found before the server is paused."""
    one = session(server)
    server.heal()
    own, given = (None, version) if whose == "caller" else (version, None)
    with pytest.raises(StreamerError):
        one.push(make_source(weights(1), weight_version=own), weight_version=given)
    assert not [call for call in server.calls if call.startswith("POST")]


# Joining.


def test_a_closed_session_does_not_join(session, server):
    one = session(server)
    one.close()
    with pytest.raises(UsageError, match="the session is closed"):
        one.join()


def test_joining_waits_for_no_push(session, server, make_source):
    one = session(server)
    errors = []

    def on_step(index):
        if index == 1:
            with pytest.raises(UsageError, match="a push of this session is under way") as caught:
                one.join()
            errors.append(caught.value)

    one.push(make_source(weights(1), on_step=on_step))
    assert len(errors) == 1
    assert server.holds(weights(1))


def test_a_group_that_cannot_be_made_gives_its_port_back(server, monkeypatch, free_port):
    port = free_port()

    def fail(*arguments):
        raise TransportError("made to fail")

    kept = []
    with monkeypatch.context() as patch:
        patch.setattr(group_module, "GlooTransport", fail)
        with pytest.raises(TransportError, match="made to fail") as caught:
            streamer.connect(server.url, port=port)
        kept.append(caught.value)
    with streamer.connect(server.url, port=port) as one:
        assert one.servers


def test_what_ends_a_push_is_told_though_a_call_cannot_be_cancelled(
    session, server, make_source, monkeypatch
):
    one = session(server)
    monkeypatch.setattr(group_module.Group, "_cancel", lambda *_: False)
    server.fail("/update_weights", 500, "no room", times=1)
    with pytest.raises(ServerRefused, match="no room") as caught:
        one.push(make_source(weights(1)))
    assert caught.value.__notes__ == ["a call to a server could not be cancelled within 5 s"]


# Events.


def test_events_tell_of_a_sync(session, server, make_source, monkeypatch):
    heard = []

    class Plugin:
        @hookimpl
        def streamer_on_event(self, event):
            heard.append((event, threading.current_thread()))

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    events = []
    one = session(server, on_event=events.append)
    report = one.push(make_source(weights(1)))
    assert [event for event, _ in heard] == events
    assert {thread for _, thread in heard} == {threading.current_thread()}
    started, *chunks, finished = events
    assert started == SyncStarted(report.tensors, report.bytes, report.chunks, (server.url,))
    assert finished == SyncFinished(report)
    assert len(chunks) == report.chunks
    assert all(isinstance(event, ChunkSent) for event in chunks)
    assert all(event.total_bytes == report.bytes for event in chunks)
    sizes = [event.bytes for event in chunks]
    assert sizes == sorted(sizes)
    assert sizes[-1] == report.bytes


def test_a_failed_sync_is_told(session, server, make_source):
    events = []
    one = session(server, on_event=events.append)
    for source in (make_source({}), "no/such/checkpoint", "nothing://x"):
        events.clear()
        with pytest.raises(StreamerError) as caught:
            one.push(source)
        assert events == [SyncFailed(caught.value)]


def test_a_plugin_that_fails_is_logged_and_stops_nothing(
    session, server, push, monkeypatch, caplog
):
    class Plugin:
        @hookimpl
        def streamer_on_event(self, event):
            raise RuntimeError("observer broke")

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    with caplog.at_level(logging.ERROR, "streamer"):
        push(session(server), [server], weights(1))
    assert "observer broke" in caplog.text


@pytest.mark.parametrize("kind", [SyncStarted, ChunkSent, SyncFinished])
def test_an_observer_of_the_caller_that_fails_tears_no_server(
    session, server, make_source, kind, caplog
):
    """A broken progress bar must not leave a server with half of the weights."""

    def observe(event):
        if isinstance(event, kind):
            raise RuntimeError("no terminal")

    one = session(server, on_event=observe)
    with caplog.at_level(logging.ERROR, "streamer"), contextlib.suppress(RuntimeError):
        one.push(make_source(weights(1)), weight_version="whole")
    assert not server.weight_version.startswith(INCOMPLETE)
    assert not server.paused


# What is found before anything is changed.


@pytest.mark.parametrize(
    ("source", "kind"),
    [("no/such/checkpoint", SourceError), ("nothing://x", PluginError), (5, SourceError)],
)
def test_a_source_that_cannot_be_opened(session, server, source, kind):
    one = session(server)
    server.heal()
    with pytest.raises(kind):
        one.push(source)
    assert server.calls == []


@pytest.mark.parametrize("what", ["empty", "twice", "broken specs"])
def test_specs_that_cannot_be_planned(session, server, make_source, what):
    one = session(server)
    server.heal()
    source = make_source({})
    if what == "twice":
        source = make_source([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    elif what == "broken specs":

        def specs():
            raise KeyError("index")

        source.specs = specs
    with pytest.raises(StreamerError):
        one.push(source)
    assert not [call for call in server.calls if call.startswith("POST")]


def test_options_are_checked_before_anything_is_asked(free_port):
    url = f"http://127.0.0.1:{free_port()}"
    for options in (
        {"pause": "stop"},
        {"num_buffers": 0},
        {"threads": 0},
        {"buffer_size": 0},
        {"backend": "mpi"},
        {"buffer_sise": 5},
    ):
        with pytest.raises(UsageError):
            Session(url, **options)
    for bad in ([], [url, url], [url, url + "/"], [url, url + "/v1"], ["ftp://host"]):
        with pytest.raises(UsageError):
            Session(bad)


def test_no_password_of_a_url_is_shown():
    for urls in (["http://u:sekrit@h:1"] * 2, ["http://u:sekrit@h:1", "http://u:sekrit@h:x"]):
        with pytest.raises(UsageError) as caught:
            Session(urls)
        assert "sekrit" not in str(caught.value)


def test_a_server_that_is_not_there(make_source, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        streamer.connect(url)
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        streamer.push(make_source(weights(1)), url)


@pytest.mark.parametrize(
    ("url", "port"), [("https://host", 443), ("http://host", 80), ("https://host:8443", 8443)]
)
def test_the_way_to_a_server_is_found_on_its_own_port(monkeypatch, url, port):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr(network.socket, "create_connection", connect)
    with pytest.raises(StreamerError, match="no route"):
        network.address_towards([url])
    assert asked == [("host", port)]


def test_servers_that_do_not_fit_together(server, fake_server, reply):
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                 "device_config": {"device": "cuda"}}}
            ),
        }
    )  # fmt: skip
    with pytest.raises(IncompatibleServer) as caught:
        streamer.connect([server.url, fake_server.url])
    assert f"{server.url}: streamer on cpu" in str(caught.value)
    assert f"{fake_server.url}: nccl on cuda" in str(caught.value)
    assert fake_server.posts == []


def test_gpus_over_there_and_none_here(fake_server, reply):
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                 "device_config": {"device": "cuda"}}}
            ),
        }
    )  # fmt: skip
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TransportError, match="torch sees no CUDA device here"):
        streamer.connect(fake_server.url)
    assert fake_server.posts == []


def test_a_push_that_vllm_s_engine_cannot_take_is_refused_before_any_post(
    fake_server, reply, make_source
):
    """Case 16."""
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}
            ),
        }
    )
    source = make_source({"mask": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(PlanError, match=r"tensor mask: .* cannot receive bool"):
        streamer.push(source, fake_server.url, packed=False)
    assert fake_server.posts == []


# The source fails.


@both_modes
def test_a_source_that_fails_midway_leaves_a_mixture_that_the_next_push_cures(
    session, server, push, make_source, packed
):
    one = session(server, packed=packed)
    push(one, [server], weights(1))

    def fail(index):
        if index == 6:
            raise OSError("disk on fire")

    server.heal()
    with pytest.raises(SourceError, match=r"source failed at tensor 6 \(layers.6.weight\)") as got:
        one.push(make_source(weights(2), on_step=fail), weight_version="half")
    if UPDATE in server.calls:
        assert got.value.held == {server.url: MIXTURE}
        assert MIXTURE in str(got.value)
        assert server.weight_version == f"{INCOMPLETE}half"
        assert server.paused
    server.heal()
    push(one, [server], weights(3))
    assert JOIN not in server.calls, "the group was whole"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
def test_a_source_that_fails_at_its_first_tensor_changes_nothing(
    session, server, push, make_source
):
    one = session(server)
    push(one, [server], weights(1), weight_version="before")
    for source in (
        make_source({}, make_source(weights(2)).specs()),
        make_source([("other", torch.zeros(1))], make_source(weights(2)).specs()),
        make_source({"a": torch.eye(2).to_sparse()}),
        make_source({"a": torch.empty(2, device="meta")}),
        make_source(
            {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
            [TensorSpec("a", torch.float32, (2, 2))],
        ),
    ):
        with pytest.raises(SourceError, match=r"^tensor 0|^source ended after 0") as caught:
            one.push(source)
        assert caught.value.held == {}
        assert server.weight_version == "before"
        assert not server.paused
        assert server.holds(weights(1))


def test_one_tensor_more_than_declared(session, server, push, make_source):
    one = session(server)
    tensors = weights(1)
    declared = make_source(tensors).specs()
    with pytest.raises(SpecMismatch, match="gave more after all"):
        one.push(make_source({**tensors, "more": torch.zeros(1)}, declared))
    push(one, [server], weights(2))


def test_sources_are_closed_by_whoever_opened_them(session, server, make_source, monkeypatch):
    mine = make_source(weights(1))
    opened = make_source(weights(2))
    broken = make_source(weights(3), on_step=lambda index: 1 / 0)

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register):
            register("opened", lambda rest: broken if rest else opened)

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    one = session(server)
    one.push(mine)
    one.push("opened://")
    with pytest.raises(SourceError, match="ZeroDivisionError"):
        one.push("opened://broken")
    assert (mine.closed, opened.closed, broken.closed) == (0, 1, 1)


def test_a_source_that_cannot_be_closed_is_logged(
    session, server, make_source, monkeypatch, caplog
):
    """The servers have the weights by then: the push has succeeded."""
    source = make_source(weights(2))

    def fail():
        raise OSError("made to fail")

    source.close = fail

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register):
            register("unclosed", lambda rest: source)

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    assert session(server).push("unclosed://").tensors == len(weights(2))
    (record,) = caplog.records
    assert record.getMessage() == "the source's close() failed"
    assert "made to fail" in str(record.exc_info[1])


# The server fails.


@pytest.mark.parametrize("where", ["/is_paused", "/pause", "/update_weight_version",
                                   "/start_weight_update"])  # fmt: skip
def test_a_begin_that_is_refused_leaves_the_old_weights_serving(
    session, server, push, make_source, where
):
    one = session(server)
    push(one, [server], weights(1), weight_version="before")
    server.fail(where, 503, "not now")
    with pytest.raises(ServerRefused, match=f"{where}: 503 not now") as caught:
        one.push(make_source(weights(2)))
    assert caught.value.held == {}
    server.heal()
    assert (server.weight_version, server.paused) == ("before", False)
    assert server.holds(weights(1))
    push(one, [server], weights(3))


def test_of_two_servers_one_refuses_to_begin(session, server, other_server, push, make_source):
    one = session(server, other_server)
    push(one, [server, other_server], weights(1), weight_version="before")
    other_server.fail("/start_weight_update", 500, "not now")
    with pytest.raises(ServerRefused, match=other_server.url):
        one.push(make_source(weights(2)))
    other_server.heal()
    for each in (server, other_server):
        assert (each.weight_version, each.paused) == ("before", False)
        assert each.holds(weights(1))
    push(one, [server, other_server], weights(3))


@both_modes
@pytest.mark.parametrize("inside", [False, True], ids=["instead", "while receiving"])
def test_an_update_that_is_refused_is_told_within_seconds(
    session, server, push, make_source, packed, inside
):
    """Cases 1, 3 and 6."""
    one = session(server, packed=packed)
    push(one, [server], weights(1))
    big = weights(2, count=40, size=50_000)
    server.fail("/update_weights", 500, "CUDA out of memory", delay=0.3, inside=inside)
    started = time.monotonic()
    with pytest.raises(ServerRefused) as caught:
        one.push(
            make_source(big, on_step=lambda index: time.sleep(0.05 if inside else 0)),
            weight_version="v2",
        )
    assert time.monotonic() - started < 15
    assert f"POST {server.url}/update_weights: 500 CUDA out of memory" in str(caught.value)
    assert caught.value.status == 500
    assert caught.value.held == {server.url: MIXTURE}
    notes = getattr(caught.value, "__notes__", [])
    assert notes == [], "workers that wait for the trainer cannot answer before it has left"
    assert server.calls.count(UPDATE) == 1
    assert server.weight_version == f"{INCOMPLETE}v2"
    assert server.paused
    server.heal()
    push(one, [server], weights(3))


def test_a_server_whose_finish_waits_for_its_workers_is_not_given_up(
    session, server, push, make_source
):
    """A vLLM server asks every worker; those that wait for the trainer answer once it leaves."""
    one = session(server)
    push(one, [server], weights(1))
    server.fail("/update_weights", 500, "no", delay=0.3, inside=True)
    server.fail("/finish_weight_update", 0, workers=True, keep=True)
    big = weights(2, count=40, size=50_000)
    with pytest.raises(ServerRefused) as caught:
        one.push(make_source(big, on_step=lambda index: time.sleep(0.05)))
    assert caught.value.held == {server.url: MIXTURE}
    server.heal()
    push(one, [server], weights(3))


def test_the_same_between_two_servers(session, server, other_server, push, make_source):
    """Whichever fails first ends the other: no server is left inside a broadcast."""
    one = session(server, other_server)
    push(one, [server, other_server], weights(1))
    other_server.fail("/update_weights", 500, "no", delay=0.3)
    big = weights(2, count=40, size=50_000)
    started = time.monotonic()
    with pytest.raises(ServerRefused, match=f"{other_server.url}/update_weights: 500 no") as got:
        one.push(make_source(big))
    assert time.monotonic() - started < 15
    assert set(got.value.held) == {server.url, other_server.url}
    assert all("mixture" in state for state in got.value.held.values())
    other_server.heal()
    push(one, [server, other_server], weights(3))


@pytest.mark.parametrize("where", ["/finish_weight_update", "/reset_prefix_cache", "/resume"])
def test_a_commit_that_is_refused(session, server, push, make_source, where):
    one = session(server)
    push(one, [server], weights(1))
    server.fail(where, 500, "no")
    with pytest.raises(ServerRefused, match=f"{where}: 500 no") as caught:
        one.push(make_source(weights(2)), weight_version="v2")
    (held,) = caught.value.held.values()
    if where == "/finish_weight_update":
        assert "holds a mixture" in held
        assert server.weight_version == f"{INCOMPLETE}v2"
        assert server.paused
    else:
        assert held == (
            "holds the new weights, but is marked incomplete and left paused: push again"
        )
        assert server.weight_version == f"{INCOMPLETE}v2"
        assert server.paused
    server.heal()
    push(one, [server], weights(3), weight_version="v3")


def test_an_init_that_is_refused(server, session, push):
    """Case 2."""
    server.fail("/init_weight_transfer_engine", 500, "no weight transfer engine")
    started = time.monotonic()
    with pytest.raises(ServerRefused) as caught:
        session(server)
    assert time.monotonic() - started < 10
    assert str(caught.value) == (
        f"POST {server.url}/init_weight_transfer_engine: 500 no weight transfer engine"
    )
    server.heal()
    push(session(server), [server], weights(1))


def test_workers_that_never_join_are_named(server, session, push):
    """Case 2: address, world size, and what did not come."""
    server.fail("/init_weight_transfer_engine", 200, delay=60)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        session(server, timeouts=Timeouts(connect=2, progress=20))
    assert 1.5 < time.monotonic() - started < 10
    text = str(caught.value)
    assert "of 2 workers, ranks [1, 2] have not joined 127.0.0.1:" in text
    assert "2 s" in text
    server.heal()
    push(session(server), [server], weights(1))


def test_an_update_that_is_not_answered_ends_at_the_deadline(session, server, push, make_source):
    """Case 5: it names the server, the endpoint and the time."""
    one = session(server, timeouts=Timeouts(connect=30, progress=2))
    push(one, [server], weights(1))
    server.fail("/update_weights", 200, delay=30, inside=True)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        one.push(make_source(weights(2)))
    assert 1.5 < time.monotonic() - started < 15
    assert server.url in str(caught.value.args[0])
    assert "update" in str(caught.value.args[0])
    assert "2 s" in str(caught.value)
    server.heal()
    push(one, [server], weights(3))


def test_a_slow_server_is_no_failure(session, server, push):
    """Case 5: 3 s in an endpoint, with a timeout of 20 s."""
    one = session(server)
    server.fail("/start_weight_update", 0, delay=3)
    push(one, [server], weights(1))


def test_a_push_has_a_limit(session, server, push, make_source):
    """It holds while bytes flow as well, and the stream is completed: no worker hangs."""
    one = session(server, timeouts=Timeouts(connect=30, progress=20, total=2))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="longer than its limit of 2 s"):
        one.push(make_source(weights(1, count=80), on_step=lambda index: time.sleep(0.1)))
    assert 1.5 < time.monotonic() - started < 8
    server.heal()
    push(one, [server], weights(2))
    assert JOIN not in server.calls


# Processes end.


@pytest.mark.parametrize("workers", [2, 1], ids=["same", "fewer workers"])
def test_a_server_that_was_replaced_is_noticed(start_server, session, push, workers):
    """Case 4: a fresh process at the same URL, before any broadcast."""
    server = start_server(2)
    one = session(server)
    push(one, [server], weights(1))
    server.kill()
    server.workers = workers
    server.start()
    server.heal()
    report = push(one, [server], weights(2))
    assert server.calls.count(JOIN) == 1
    assert server.calls.count(UPDATE) == 1
    assert report.servers[0].world_size == workers


def test_a_server_that_was_replaced_before_the_first_push_is_noticed(start_server, session, push):
    """It says the same of itself as the one before it: only its workers are others."""
    server = start_server(2)
    one = session(server)
    server.kill()
    server.start()
    server.heal()
    push(one, [server], weights(1))
    assert server.calls.count(JOIN) == 1
    assert server.calls.count(UPDATE) == 1


def test_a_worker_that_was_killed_between_pushes_is_noticed(
    start_server, session, push, make_source
):
    """Nothing is changed on any server: the old weights go on being served."""
    server = start_server(2)
    one = session(server)
    push(one, [server], weights(1), weight_version="old")
    os.kill(server.pids[1], signal.SIGKILL)
    server.heal()
    with pytest.raises(ServerRefused, match="worker 1 has died: restart the server"):
        one.push(make_source(weights(2)))
    assert not [call for call in server.calls if call in (UPDATE, "POST /pause")]
    assert server.weight_version == "old"
    assert not server.paused


def test_a_worker_that_does_not_answer_is_not_waited_for_without_end(
    start_server, session, push, make_source
):
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=2, progress=2))
    push(one, [server], weights(1), weight_version="old")
    os.kill(server.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"of 2 workers, .* joined"):
        one.push(make_source(weights(2)))
    assert time.monotonic() - started < 15
    assert server.weight_version == "old"
    assert not server.paused
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


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


def test_to_see_that_all_are_there_takes_no_time(session, server, make_source):
    """The workers answer while the servers are asked."""
    one = session(server)
    source = make_source(weights(1))
    seconds = []
    for _ in range(10):
        one.push(source)
        one._fleet.group.call_roll()
        time.sleep(0.01)  # as long as a server takes to answer
        started = time.perf_counter()
        assert one._fleet.group.is_whole(lambda: None)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3


def test_the_connect_timeout_is_the_workers_too(session, server, monkeypatch):
    seen = []
    join = VllmDriver.join

    def spy(self, info):
        seen.append(info.rendezvous["join_seconds"])
        join(self, info)

    monkeypatch.setattr(VllmDriver, "join", spy)
    session(server, timeouts=Timeouts(connect=87, progress=20))
    assert 87 < seen[0] < 97


def test_a_server_that_is_killed_while_it_receives(start_server, session, push, make_source):
    server = start_server(1)
    one = session(server)
    push(one, [server], weights(1))

    def kill(index):
        if index == 8:
            server.kill()

    started = time.monotonic()
    with pytest.raises(StreamerError) as caught:
        one.push(make_source(weights(2, count=40, size=50_000), on_step=kill))
    assert time.monotonic() - started < 20
    assert isinstance(caught.value, (ServerError, TransportError))
    assert server.url in str(caught.value)
    with pytest.raises(ServerUnreachable):
        one.push(make_source(weights(2)))
    server.start()
    push(one, [server], weights(3))


def test_a_worker_that_is_killed_while_it_receives(start_server, session, make_source):
    server = start_server(2)
    one = session(server)

    def kill(index):
        if index == 8:
            os.kill(server.pids[0], signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(StreamerError) as caught:
        one.push(make_source(weights(2, count=40, size=50_000), on_step=kill))
    assert time.monotonic() - started < 20
    # One remedy, whoever tells it: not also "push again".
    assert caught.value.held == {
        server.url: "holds a mixture of weights and has lost a worker (/health: 503): restart it"
    }


def test_a_worker_that_hangs_does_not_take_the_others_along(
    start_server, session, push, make_source
):
    """Gloo cannot cancel what is stuck; the other workers must hear of the end all the same."""
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=10, progress=2))
    push(one, [server], weights(1))

    def stop(index):
        if index == 8:
            os.kill(server.pids[1], signal.SIGSTOP)

    with pytest.raises(StreamerError):
        one.push(make_source(weights(2, count=40, size=50_000), on_step=stop))
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


def test_the_limit_of_a_whole_push_ends_a_broadcast_too(start_server, session, push, make_source):
    server = start_server(2)
    one = session(server, timeouts=Timeouts(connect=10, progress=60, total=3))
    push(one, [server], weights(1))

    def stop(index):
        if index == 8:
            os.kill(server.pids[1], signal.SIGSTOP)

    started = time.monotonic()
    with pytest.raises(StreamerError):
        one.push(make_source(weights(2, count=40, size=50_000), on_step=stop))
    assert time.monotonic() - started < 12
    os.kill(server.pids[1], signal.SIGCONT)
    push(one, [server], weights(3))


def test_a_group_that_was_aborted_is_joined_anew(session, server, push):
    """As after a second signal, which may come while the first one is tidied up behind."""
    one = session(server)
    push(one, [server], weights(1))
    one._fleet.abort()
    push(one, [server], weights(2))


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


@contextlib.contextmanager
def trainer(server, code=TRAINER):
    process = subprocess.Popen(
        [sys.executable, "-c", code, server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


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
    with trainer(server) as process:
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
        assert server.weight_version == f"{INCOMPLETE}from-a-trainer"
        assert server.paused
        push(one, [server], weights(3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_completes_the_stream_first(server, session, push, number):
    """A worker that is left inside a broadcast of vLLM's own engine never answers again."""
    with trainer(server) as process:
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
    assert server.weight_version == f"{INCOMPLETE}from-a-trainer"
    server.heal()
    push(session(server), [server], weights(3))


def test_a_second_signal_ends_the_trainer_whatever_it_waits_for(server):
    """Here the server never receives, and the stream cannot be completed."""
    server.fail("/update_weights", 500, delay=60)
    code = TRAINER.replace("100_000", "5_000_000")
    with trainer(server, code) as process:
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
    with trainer(server, code) as process:
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
    with trainer(server, code) as process:
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


# Nothing grows: case 7.


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@both_modes
def test_ten_syncs_leak_nothing(session, server, make_source, deferred, leaks, eventually, packed):
    one = session(server, packed=packed)
    source = make_source({n: deferred(t) for n, t in weights(1, count=20, size=5000).items()})
    for step in range(10):
        one.push(source)
        if step == 1:
            before, memory = leaks(), resident()
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)
    assert resident() - memory < 32 << 20


def test_ten_failed_syncs_leak_nothing(session, server, make_source, leaks, eventually):
    """Failed ones too, whichever side failed, also if the caller keeps the errors."""
    one = session(server)
    one.push(make_source(weights(1)))
    kept = []

    def fail(index):
        if index == 6:
            raise OSError("disk on fire")

    for step in range(10):
        if step % 2:
            server.fail("/update_weights", 500, "no", inside=True)
            source = make_source(weights(2))
        else:
            source = make_source(weights(2), on_step=fail)
        with pytest.raises(StreamerError) as caught:
            one.push(source)
        kept.append(caught.value)
        server.heal()
        one.push(make_source(weights(3)))
        if step == 1:
            before = leaks()
    assert len(kept) == 10
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)


def test_ten_sessions_leak_nothing(server, make_source, leaks, eventually):
    for step in range(10):
        with streamer.connect(server.url, timeouts=TIMEOUTS) as one:
            one.push(make_source(weights(step)))
        if step == 1:
            before = leaks()
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)


def test_a_failed_connect_leaves_nothing(server, leaks, eventually):
    before = leaks()
    for _ in range(3):
        server.fail("/init_weight_transfer_engine", 500, "no")
        with pytest.raises(ServerRefused):
            streamer.connect(server.url, timeouts=TIMEOUTS)
    eventually(lambda: all(now <= before[name] + 2 for name, now in leaks().items()), 10)
    assert leaks()["threads"] == 0


def test_the_specs_of_a_source_may_be_any_sequence(session, server, make_source):
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    declared = tuple(TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    session(server).push(make_source(tensors, declared))
    assert server.holds(tensors)
