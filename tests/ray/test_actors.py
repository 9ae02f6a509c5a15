"""Engines that are held by Ray actors, on a real local Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
import time
from pathlib import Path

import pytest
import ray
import torch

import streamer
from streamer import (
    DeadlineExceeded,
    Engine,
    ServerRefused,
    ServerUnreachable,
    Timeouts,
    UsageError,
)
from streamer.drivers.mark import INCOMPLETE
from streamer.testing.engine import LocalEngine

TIMEOUTS = Timeouts(connect=30, progress=20)
OPTIONS = {"backend": "streamer", "timeouts": TIMEOUTS, "buffer_size": 4000}


class Actor(LocalEngine):
    """Takes requests as vLLM's engines do, and can be told to misbehave."""

    def __init__(self, workers=1):
        super().__init__(workers)
        self.fault = {}

    def misbehave(self, **fault):
        self.fault = fault

    def _misbehave(self, method):
        how = self.fault.pop(method, None)
        if how == "raise":
            raise ValueError("no\nway")
        if how == "die":
            os._exit(1)
        if how is not None:
            time.sleep(how)

    def init_weight_transfer_engine(self, request):
        self._misbehave("init")
        super().init_weight_transfer_engine(request.init_info)

    def start_weight_update(self):
        self._misbehave("start")
        super().start_weight_update()

    def update_weights(self, request):
        self._misbehave("update")
        super().update_weights(request.update_info)


def on_cpu(*actors):
    return [Engine(actor, device="cpu") for actor in actors]


def state(actor):
    return ray.get([actor.get_weight_version.remote(), actor.is_paused.remote()])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_several_actors_are_one_group(start_actor, make_source, weights, holds, packed):
    actors = [start_actor(Actor), start_actor(Actor, 2)]
    with streamer.connect(on_cpu(*actors), packed=packed, **OPTIONS) as session:
        for step in range(3):
            report = session.push(make_source(weights(step)), weight_version=f"step-{step}")
            assert all(holds(actor, weights(step)) for actor in actors)
            assert [state(actor) for actor in actors] == [[f"step-{step}", False]] * 2
    assert [one.world_size for one in report.servers] == [1, 2]
    assert [one.url for one in report.servers] == [repr(actor) for actor in actors]


def test_actors_and_servers_are_one_group(start_actor, server, make_source, weights, holds):
    actor = start_actor(Actor)
    to = [*on_cpu(actor), server.url]
    report = streamer.push(make_source(weights(0)), to=to, verify=True, **OPTIONS)
    assert {one.verified for one in report.servers} == {"digest"}
    assert holds(actor, weights(0))
    assert server.holds(weights(0))


def test_the_snippet_of_the_page(start_actor, holds):
    """docs/frameworks.md; the other snippets are run in tests/examples."""
    path = Path(__file__).parents[1] / "examples" / "recipes.py"
    spec = importlib.util.spec_from_file_location("recipes", path)
    recipes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipes)
    actors = [start_actor(Actor), start_actor(Actor)]
    tensors = {"a": torch.arange(5.0)}
    names = {"streamer": streamer, "actors": actors, "weights": tensors}
    exec(recipes.snippets()["Ray"][0], names)
    assert all(holds(actor, tensors) for actor in actors)


def test_the_address_that_actors_are_given_is_the_node_s(start_actor, monkeypatch):
    seen = []

    class Seeing(Actor):
        def init_weight_transfer_engine(self, request):
            self.seen = request.init_info["master_address"]
            super().init_weight_transfer_engine(request)

        def get_seen(self):
            return self.seen

    actor = start_actor(Seeing)
    streamer.connect(on_cpu(actor), **OPTIONS).close()
    seen.append(ray.get(actor.get_seen.remote()))
    assert seen == [ray.util.get_node_ip_address()]


def test_what_an_actor_does_not_tell_has_to_be_given(start_actor, make_source, weights, holds):
    actor = start_actor(Actor)
    with pytest.raises(UsageError, match=r"Actor\(Actor, \w+\) does not say which engine receives"):
        streamer.connect(actor)
    given = Engine(actor, name="mine", world_size=1, backend="streamer", device="cpu")
    report = streamer.push(make_source(weights(0)), to=given)
    assert report.servers[0].url == "mine"
    assert holds(actor, weights(0))


@pytest.mark.parametrize(("moment", "flows"), [("start", False), ("update", True)])
def test_an_actor_that_raises_is_named_and_ends_the_push(
    start_actor, make_source, weights, holds, moment, flows
):
    good, bad = start_actor(Actor), start_actor(Actor)
    with streamer.connect(on_cpu(good, bad), **OPTIONS) as session:
        session.push(make_source(weights(0)), weight_version="old")
        ray.get(bad.misbehave.remote(**{moment: "raise"}))
        with pytest.raises(ServerRefused, match=r"ValueError: no way") as caught:
            session.push(make_source(weights(1)), weight_version="new")
        assert repr(bad) in str(caught.value)
        if flows:
            for version, paused in (state(good), state(bad)):
                assert version.startswith(f"{INCOMPLETE}new#")
                assert paused
            assert set(caught.value.held) == {repr(good), repr(bad)}
        else:
            assert [state(actor) for actor in (good, bad)] == [["old", False]] * 2
            assert holds(good, weights(0))
        session.push(make_source(weights(2)))
    assert holds(good, weights(2))
    assert holds(bad, weights(2))


def test_an_actor_that_does_not_take_the_argument_refuses(start_actor, make_source, weights):
    class KeywordOnly(Actor):
        def update_weights(self, *, update_info):
            raise AssertionError

    actor = start_actor(KeywordOnly)
    with pytest.raises(ServerRefused, match=r"update_weights: TypeError: too many pos") as caught:
        streamer.push(make_source(weights(0)), to=on_cpu(actor), **OPTIONS)
    assert repr(actor) in caught.value.held


def test_an_actor_that_passes_calls_on_is_given_what_the_engine_takes(
    start_actor, make_source, weights
):
    class Wrapper(Actor):
        def pause_generation(self, *args, **kwargs):
            self.paused_with = kwargs
            super().pause_generation(*args, **kwargs)

        def finish_weight_update(self, *, weight_version=None):
            super().finish_weight_update(weight_version)

        def get_paused_with(self):
            return self.paused_with

    actor = start_actor(Wrapper)
    to = on_cpu(actor)
    streamer.push(make_source(weights(0)), to=to, pause="keep", weight_version="v", **OPTIONS)
    assert ray.get(actor.get_paused_with.remote()) == {"mode": "keep"}
    assert state(actor) == ["v", False]


def test_an_actor_that_dies_is_named_and_the_others_go_on(start_actor, make_source, weights, holds):
    good, bad = start_actor(Actor), start_actor(Actor)
    with streamer.connect(on_cpu(good, bad), **OPTIONS) as session:
        session.push(make_source(weights(0)), weight_version="old")
        ray.get(bad.misbehave.remote(update="die"))
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=r"ActorDiedError: .* Is the actor") as caught:
            session.push(make_source(weights(1)), weight_version="new")
        assert time.monotonic() - started < 20
        assert repr(bad) in str(caught.value)
        assert "push again" in str(caught.value.held[repr(good)])
        assert "restart it" in str(caught.value.held[repr(bad)])
    streamer.push(make_source(weights(2)), to=on_cpu(good), **OPTIONS)
    assert holds(good, weights(2))
    assert not state(good)[1]


def test_an_actor_that_does_not_answer_is_given_up(start_actor, make_source, weights, holds):
    actor = start_actor(Actor)
    # As long as a machine that is busy may take for a chunk.
    options = {**OPTIONS, "timeouts": Timeouts(connect=20, progress=8)}
    with streamer.connect(on_cpu(actor), **options) as session:
        ray.get(actor.misbehave.remote(start=11))
        with pytest.raises(DeadlineExceeded, match=r"start_weight_update: no answer after 8"):
            session.push(make_source(weights(1)))
        ray.get(actor.is_paused.remote())  # it is through
        session.push(make_source(weights(2)))
        assert holds(actor, weights(2))


def test_a_cancelled_push_leaves_no_actor_stuck(start_actor, make_source, weights, holds):
    actor = start_actor(Actor)
    half = threading.Event()

    def on_step(index):
        if index >= 6:
            half.set()
            time.sleep(0.05)

    async def main():
        async with streamer.aconnect(on_cpu(actor), num_buffers=1, **OPTIONS) as session:
            push = asyncio.create_task(session.apush(make_source(weights(0), on_step=on_step)))
            await asyncio.to_thread(half.wait, 20)
            push.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await push
            assert "holds a mixture" in caught.value.__notes__[0]
            assert (await asyncio.to_thread(state, actor))[1]
            await session.apush(make_source(weights(1)))

    asyncio.run(main())
    assert holds(actor, weights(1))
