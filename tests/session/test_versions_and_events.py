"""The name of the weights, and what a caller hears of a sync."""

from __future__ import annotations

import contextlib
import logging
import re
import threading

import pytest

from kit_checks import all_told
from kit_session import UPDATE, weights
from streamer import RankError, ServerRefused, StreamerError, hookimpl, registry
from streamer.drivers.mark import INCOMPLETE
from streamer.events import ChunkSent, SyncFailed, SyncFinished, SyncStarted
from streamer.leader import Leader
from streamer.registry import Registry

pytestmark = pytest.mark.timeout(120)


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
    server.fail("/resume", 500, times=2)
    with pytest.raises(ServerRefused) as caught:
        one.push(source)
    assert all_told(caught.value) == {
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


def test_a_rank_that_fails_after_the_last_byte(session, server, make_source, monkeypatch):
    """The servers have been let go by then, and the push is told once, as failed."""

    def finish(leader, report):
        raise RankError("rank 1 failed: OSError", 1)

    monkeypatch.setattr(Leader, "finish", finish)
    events = []
    one = session(server, on_event=events.append)
    with pytest.raises(RankError) as caught:
        one.push(make_source(weights(1)))
    assert all_told(caught.value) == {server.url: "holds the new weights, and answers with them"}
    assert [type(event) for event in events[-2:]] == [ChunkSent, SyncFailed]
    assert server.holds(weights(1))
    assert not server.paused


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
