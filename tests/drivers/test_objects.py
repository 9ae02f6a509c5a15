"""Engines that are objects: pushed to as servers are, and what happens when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from typing import ClassVar

import pytest
import torch

import streamer
from kit_checks import all_told
from kit_sources import checksums_of
from streamer import (
    DeadlineExceeded,
    Engine,
    IncompatibleServer,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    SourceError,
    Timeouts,
    UsageError,
)
from streamer.drivers import engine_routes, recovery
from streamer.drivers.calls import LocalCalls
from streamer.drivers.mark import INCOMPLETE
from streamer.testing.engine import LocalEngine

pytestmark = pytest.mark.usefixtures("no_threads_left")

TIMEOUTS = Timeouts(connect=30, progress=20)


@pytest.fixture
def make_engine():
    """Engines of any class, closed at the end."""
    made = []

    def make(kind=LocalEngine, workers=1):
        made.append(kind(workers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def holds():
    def check(engine, tensors):
        return all(sums == checksums_of(tensors) for sums in engine.checksums())

    return check


class Bare:
    """The four methods and nothing else, around a `LocalEngine`."""

    def __init__(self, workers):
        self.inner = LocalEngine(workers)
        self.checksums, self.close = self.inner.checksums, self.inner.close

    def init_weight_transfer_engine(self, init_info):
        self.inner.init_weight_transfer_engine(init_info)

    def start_weight_update(self):
        self.inner.start_weight_update()

    def update_weights(self, update_info):
        self.inner.update_weights(update_info)

    def finish_weight_update(self):
        self.inner.finish_weight_update()


class Nameless(Bare):
    """Can be paused, and keeps no version."""

    def __init__(self, workers):
        super().__init__(workers)
        inner = self.inner
        self.is_paused, self.pause_generation = inner.is_paused, inner.pause_generation
        self.resume_generation = inner.resume_generation


class TellsOnly(Bare):
    """Knows a version of its own, which nobody can change."""

    def get_weight_version(self):
        return "default"


class AsLLM(LocalEngine):
    """Takes requests as vLLM's ``LLM`` does: a dict, or an object with an attribute."""

    by_key = True

    def init_weight_transfer_engine(self, request):
        info = request["init_info"] if self.by_key else request.init_info
        super().init_weight_transfer_engine(info)

    def update_weights(self, request):
        info = request["update_info"] if self.by_key else request.update_info
        super().update_weights(info)


class AsAsyncLLM(AsLLM):
    """Coroutines of one event loop, as vLLM's ``AsyncLLM`` has."""

    by_key = False

    def __init__(self, workers):
        super().__init__(workers)
        self.threads = set()

    async def _off(self, call, *args):
        self.threads.add(threading.current_thread().name)
        await asyncio.to_thread(call, *args)

    async def init_weight_transfer_engine(self, request):
        await self._off(super().init_weight_transfer_engine, request)

    async def start_weight_update(self):
        super().start_weight_update()

    async def update_weights(self, request):
        await self._off(super().update_weights, request)

    async def finish_weight_update(self, weight_version=None):
        super().finish_weight_update(weight_version)

    async def is_paused(self):
        return super().is_paused()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_an_engine_is_a_server(make_engine, make_source, weights, holds, packed):
    engine = make_engine(workers=2)
    with streamer.connect(engine, packed=packed, buffer_size=3000, timeouts=TIMEOUTS) as session:
        for step in range(3):
            report = session.push(make_source(weights(step)), weight_version=f"step-{step}")
            assert holds(engine, weights(step))
            assert engine.get_weight_version() == f"step-{step}"
            assert not engine.is_paused()
    (server,) = report.servers
    assert (server.url, server.world_size) == ("LocalEngine", 2)


def test_an_engine_and_urls_are_one_group(make_engine, server, make_source, weights, holds):
    engines = [make_engine(), make_engine(workers=2)]
    source = make_source(weights())
    report = streamer.push(source, to=[engines[0], server.url, engines[1]], verify=True)
    assert [one.url for one in report.servers] == ["LocalEngine", server.url, "LocalEngine #2"]
    assert {one.verified for one in report.servers} == {"digest"}
    assert all(holds(engine, weights()) for engine in engines)
    assert server.holds(weights())


def test_the_four_methods_are_enough(make_engine, make_source, weights, holds):
    bare = make_engine(Bare)
    engine = Engine(bare, name="mine", world_size=1, backend="streamer", device="cpu")
    with streamer.connect(engine) as session:
        session.push(make_source(weights()), weight_version="one")
        assert holds(bare, weights())
        report = session.push(make_source(weights(1)), weight_version="two")
    assert holds(bare, weights(1))
    assert report.servers[0].url == "mine"


@pytest.mark.parametrize("by_key", [True, False], ids=["key", "attribute"])
def test_requests_of_vllm_s_shape(make_engine, make_source, weights, holds, monkeypatch, by_key):
    monkeypatch.setattr(AsLLM, "by_key", by_key)
    engine = make_engine(AsLLM)
    streamer.push(make_source(weights()), to=engine, weight_version="v")
    assert holds(engine, weights())
    assert engine.get_weight_version() == "v"


def test_coroutines_run_on_the_loop_that_awaits(make_engine, make_source, weights, holds):
    engine = make_engine(AsAsyncLLM, workers=2)
    asyncio.run(streamer.apush(make_source(weights()), to=engine))
    assert holds(engine, weights())
    assert engine.threads == {"MainThread"}


def test_coroutines_without_a_loop_are_refused(make_engine, make_source, weights):
    with pytest.raises(UsageError, match=r"AsAsyncLLM\.\w+ is a coroutine: push with .*aconnect"):
        streamer.push(make_source(weights()), to=make_engine(AsAsyncLLM))


def test_a_push_on_the_engine_s_own_loop_is_refused_at_once(
    make_engine, make_source, weights, holds
):
    """It would block the loop, and so wait for what cannot begin; from a thread it may."""
    engine = make_engine(AsAsyncLLM)
    remedy = "AsAsyncLLM runs on this event loop.*await session.apush.*or push from another thread"

    async def main():
        to = Engine(engine, loop=asyncio.get_running_loop())
        started = time.monotonic()
        with pytest.raises(UsageError, match=remedy):
            streamer.push(make_source(weights()), to=to)
        with pytest.raises(UsageError, match=remedy):
            streamer.connect(to)
        async with streamer.aconnect(engine) as session:
            with pytest.raises(UsageError, match=remedy):
                session.push(make_source(weights()))
            with pytest.raises(UsageError, match=remedy):
                session.join()
            assert time.monotonic() - started < 10
            await asyncio.to_thread(session.push, make_source(weights()))

    asyncio.run(main())
    assert holds(engine, weights())


def test_a_push_on_another_loop_than_the_engine_s_goes_on(make_engine, make_source, weights, holds):
    engine = make_engine(AsAsyncLLM)
    theirs = asyncio.new_event_loop()
    thread = threading.Thread(target=theirs.run_forever)
    thread.start()

    async def main():
        streamer.push(make_source(weights()), to=Engine(engine, loop=theirs))

    asyncio.run(main())
    theirs.call_soon_threadsafe(theirs.stop)
    thread.join()
    theirs.close()
    assert holds(engine, weights())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": "streamer"}, "does not say how many workers: give streamer.Engine"),
        ({"world_size": 0, "backend": "streamer"}, "says that it has 0 workers"),
        ({"world_size": 1}, "does not say which engine receives.*the option backend"),
        ({"world_size": 1, "backend": "ipc"}, "Bare receives with the backend 'ipc'"),
    ],
)
def test_what_an_engine_does_not_tell_has_to_be_given(make_engine, given, said):
    with pytest.raises((UsageError, IncompatibleServer), match=said):
        streamer.connect(Engine(make_engine(Bare), **given))


class Wrapper:
    """Passes every call on, as instrumentation does, and notes the keywords."""

    backend, device = "streamer", "cpu"

    def __init__(self, workers):
        self.inner = LocalEngine(workers)
        self.inner.reset_prefix_cache = lambda reset_running_requests=False: None
        self.given = {}

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if not callable(method):
            return method

        def wrapped(*args, **kwargs):
            self.given[name] = kwargs
            return method(*args, **kwargs)

        return wrapped


class Untold(Wrapper):
    """As `Wrapper`, with methods that have no signature, as some of compiled code."""

    def __getattr__(self, name):
        method = super().__getattr__(name)
        if callable(method):
            method.__signature__ = "none"
        return method


@pytest.mark.parametrize("kind", [Wrapper, Untold])
def test_a_wrapper_is_given_what_the_engine_takes(make_engine, make_source, weights, holds, kind):
    engine = make_engine(kind)
    streamer.push(make_source(weights()), to=engine, pause="keep", weight_version="v")
    assert engine.given["pause_generation"] == {"mode": "keep"}
    assert engine.given["reset_prefix_cache"] == {"reset_running_requests": True}
    assert engine.inner.get_weight_version() == "v"
    assert holds(engine, weights())


def test_an_engine_that_tells_a_version_but_takes_none(make_engine, make_source, weights, holds):
    engine = make_engine(TellsOnly)
    given = Engine(engine, world_size=1, backend="streamer", device="cpu")
    with streamer.connect(given, timeouts=TIMEOUTS) as session:
        for step in range(2):
            session.push(make_source(weights(step)), weight_version=f"step-{step}")
            assert holds(engine, weights(step))


class KeywordOnly(LocalEngine):
    def finish_weight_update(self, *, weight_version=None):
        super().finish_weight_update(weight_version)


class Other(LocalEngine):
    def finish_weight_update(self, timeout=30.0):
        assert timeout == 30.0
        super().finish_weight_update()


@pytest.mark.parametrize("kind", [KeywordOnly, Other])
def test_only_a_parameter_of_that_name_is_given_the_version(
    make_engine, make_source, weights, kind
):
    engine = make_engine(kind)
    streamer.push(make_source(weights()), to=engine, weight_version="v1")
    assert engine.get_weight_version() == "v1"


@pytest.mark.parametrize("where", ["attribute", "given"])
def test_the_device_of_an_engine_may_be_torch_s(make_engine, make_source, weights, holds, where):
    bare, device = make_engine(Bare), torch.device("cpu")
    bare.device = device if where == "attribute" else None
    engine = Engine(
        bare, world_size=1, backend="streamer", device=device if where == "given" else None
    )
    streamer.push(make_source(weights()), to=engine)
    assert holds(bare, weights())


@pytest.mark.parametrize("device", ["CPU", "gpu", torch.device("meta")])
def test_a_device_that_no_engine_has(make_engine, device):
    with pytest.raises(UsageError, match=rf"{device}.*, not on cuda or cpu: give .*device="):
        streamer.connect(Engine(make_engine(), device=device))


@pytest.mark.parametrize("to", [object(), [object()], 3, Engine(None)])
def test_what_is_no_server(to):
    with pytest.raises(UsageError, match=r"is no server.*it has no init_weight_transfer_engine"):
        streamer.push({}, to=to)


def test_one_engine_twice(make_engine):
    engine = make_engine()
    with pytest.raises(UsageError, match="LocalEngine is given twice"):
        streamer.connect([engine, Engine(engine)])


def test_an_engine_of_vllm_tells_by_its_configuration(make_engine, make_source, weights, holds):
    class Config:
        def __init__(self, **values):
            self.__dict__.update(values)

    bare = make_engine(Bare, workers=2)
    bare.vllm_config = Config(
        parallel_config=Config(world_size_across_dp=2),
        weight_transfer_config=Config(backend="streamer"),
        device_config=Config(device=torch.device("cpu")),
    )
    assert streamer.push(make_source(weights()), to=bare).servers[0].world_size == 2
    assert holds(bare, weights())


# What fails.


class Failing(LocalEngine):
    """Raises in one method, the next time it is called."""

    broken: str = ""

    def _fail(self, method):
        if self.broken == method:
            self.broken = ""
            raise ValueError("no\nway")

    def init_weight_transfer_engine(self, init_info):
        self._fail("init_weight_transfer_engine")
        super().init_weight_transfer_engine(init_info)

    def start_weight_update(self):
        self._fail("start_weight_update")
        super().start_weight_update()

    def update_weights(self, update_info):
        self._fail("update_weights")
        super().update_weights(update_info)

    def finish_weight_update(self, weight_version=None):
        self._fail("finish_weight_update")
        super().finish_weight_update(weight_version)


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ("init_weight_transfer_engine", "old"),
        ("start_weight_update", "old"),
        ("update_weights", "mixture"),
        ("finish_weight_update", "mixture"),
    ],
)
def test_a_method_that_raises_ends_the_push_on_every_server(
    make_engine, server, make_source, weights, holds, method, held
):
    engine = make_engine(Failing)
    with streamer.Session([engine, server.url], timeouts=TIMEOUTS) as session:
        session.push(make_source(weights()), weight_version="old")
        if method == "init_weight_transfer_engine":
            session._fleet.leave()
        engine.broken = method
        started = time.monotonic()
        with pytest.raises(
            ServerRefused, match=rf"Failing\.{method}: ValueError: no way"
        ) as caught:
            session.push(make_source(weights(1)), weight_version="new")
        assert time.monotonic() - started < 10
        if held == "old":
            assert holds(engine, weights())
            assert server.holds(weights())
            assert engine.get_weight_version() == server.weight_version == "old"
            assert not engine.is_paused()
            assert not server.paused
        else:
            assert set(caught.value.held) == {"Failing", server.url}
            assert engine.is_paused()
            assert engine.get_weight_version().startswith(f"{INCOMPLETE}new#")
            # The other one has committed before it could know.
            committed = method == "finish_weight_update"
            named = "new" if committed else f"{INCOMPLETE}new#"
            assert server.weight_version.startswith(named)
            assert server.paused is not committed
        session.push(make_source(weights(2)))
        assert holds(engine, weights(2))
        assert server.holds(weights(2))
        assert not engine.is_paused()
        assert not server.paused


def test_an_engine_that_cannot_be_paused_says_so(make_engine, make_source, weights, source_error):
    def fail(index):
        if index == 6:
            raise source_error("torn")

    bare = Engine(make_engine(Bare), world_size=1, backend="streamer", device="cpu")
    with (
        streamer.connect(bare, buffer_size=1000, num_buffers=1) as session,
        pytest.raises(SourceError) as caught,
    ):
        session.push(make_source(weights(), on_step=fail))
    assert all_told(caught.value)["Bare"] == (
        "holds a mixture of old and new weights, cannot be paused: push again before it generates "
        "anything"
    )


class Stuck(LocalEngine):
    """Does not come back from one method until it is let go."""

    stuck = ""

    def __init__(self, workers):
        super().__init__(workers)
        self.go = threading.Event()

    def start_weight_update(self):
        if self.stuck:
            self.go.wait()
        super().start_weight_update()

    def close(self):
        self.go.set()
        super().close()


def test_the_mark_of_an_engine_that_keeps_no_version_is_there_for_the_next_session(
    make_engine, make_source, weights, holds
):
    """Or its pause would be taken for its user's, and stay."""
    engine = make_engine(Nameless)
    to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
    engine.inner.update_weights = None
    with pytest.raises(ServerRefused, match="holds a mixture"):
        streamer.push(make_source(weights(1)), to, timeouts=TIMEOUTS)
    assert engine.is_paused()
    del engine.inner.update_weights
    streamer.push(make_source(weights(2)), to, timeouts=TIMEOUTS)
    assert holds(engine, weights(2))
    assert not engine.is_paused()
    engine.pause_generation()
    streamer.push(make_source(weights(3)), to, timeouts=TIMEOUTS)
    assert engine.is_paused()


class Alike(Nameless):
    """Any two are equal, as dataclasses may be."""

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


def test_the_mark_of_one_engine_is_not_that_of_another_that_is_equal(
    make_engine, make_source, weights
):
    broken, sound = make_engine(Alike), make_engine(Alike)
    broken.inner.update_weights = None
    for engine in (broken, sound):
        to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
        with contextlib.suppress(ServerRefused):
            streamer.push(make_source(weights(1)), to, timeouts=TIMEOUTS)
    assert (broken.is_paused(), sound.is_paused()) == (True, False)
    del broken.inner.update_weights
    to = streamer.Engine(broken, world_size=1, backend="streamer", device="cpu")
    streamer.push(make_source(weights(2)), to, timeouts=TIMEOUTS)
    assert not broken.is_paused()


class Silent(Nameless):
    """Does not tell either whether it is paused."""

    def __init__(self, workers):
        super().__init__(workers)
        del self.is_paused


def test_an_engine_that_does_not_tell_that_it_is_paused_is_resumed(
    make_engine, make_source, weights
):
    engine = make_engine(Silent)
    to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
    engine.inner.update_weights = None
    with pytest.raises(ServerRefused, match="left paused"):
        streamer.push(make_source(weights(1)), to, timeouts=TIMEOUTS)
    del engine.inner.update_weights
    streamer.push(make_source(weights(2)), to, pause="none", timeouts=TIMEOUTS)
    assert not engine.inner.is_paused()


def test_an_engine_that_names_itself_and_tells_no_pause_is_resumed(
    make_engine, make_source, weights
):
    class Untold(Failing):
        is_paused = None

    engine = make_engine(Untold)
    engine.broken = "update_weights"
    with pytest.raises(ServerRefused, match="left paused"):
        streamer.push(make_source(weights(1)), engine, timeouts=TIMEOUTS)
    streamer.push(make_source(weights(2)), engine, pause="none", timeouts=TIMEOUTS)
    assert not engine._paused


def test_what_one_session_has_repaired_another_one_of_the_same_engine_knows(
    make_engine, make_source, weights
):
    engine = make_engine(Nameless)
    to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
    with (
        streamer.connect(to, timeouts=TIMEOUTS) as one,
        streamer.connect(to, timeouts=TIMEOUTS) as other,
    ):
        engine.inner.update_weights = None
        with pytest.raises(ServerRefused, match="left paused"):
            one.push(make_source(weights(1)))
        del engine.inner.update_weights
        for session in (other, one, other):
            session.push(make_source(weights(2)))
            assert not engine.is_paused()


def test_what_is_kept_of_engines_does_not_grow(make_engine):
    engine = make_engine(Nameless)
    to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
    before = len(weakref.finalize._registry)
    for _ in range(5):
        streamer.Session(to).close()
    assert len(weakref.finalize._registry) == before + 1
    assert id(engine) in engine_routes._all_kept


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_that_cannot_be_paused_is_reset_when_the_update_is_closed(
    make_engine, make_source, weights, times
):
    """Also in the push after one that has failed."""

    class Running(Bare):
        calls: ClassVar[list[str]] = []

        def finish_weight_update(self):
            self.calls.append("finish")
            super().finish_weight_update()

        def reset_prefix_cache(self):
            self.calls.append("reset")

    engine = make_engine(Running)
    to = streamer.Engine(engine, world_size=1, backend="streamer", device="cpu")
    with streamer.connect(to, timeouts=TIMEOUTS) as session:
        if times == 2:
            engine.inner.update_weights = None
            with pytest.raises(ServerRefused):
                session.push(make_source(weights(1)))
            del engine.inner.update_weights
        Running.calls.clear()
        session.push(make_source(weights(2)))
    assert Running.calls == ["finish", "reset"]


class Numbered(LocalEngine):
    """Has numbers for versions."""

    def get_weight_version(self):
        return len(super().get_weight_version())


def test_a_version_that_is_no_text_is_taken_for_one(make_engine, make_source, weights):
    with (
        streamer.connect(make_engine(Numbered), timeouts=TIMEOUTS) as session,
        pytest.raises(ServerError, match=r"its weights are named '\d+', and not 'streamer-inc"),
    ):
        session.push(make_source(weights(1)))


def test_a_call_that_does_not_end_is_given_up_at_its_deadline(
    make_engine, make_source, weights, holds, monkeypatch
):
    monkeypatch.setattr(recovery, "CLEAN_UP_SECONDS", 0.5)
    engine = make_engine(Stuck)
    with streamer.connect(engine, timeouts=Timeouts(connect=10, progress=1)) as session:
        session.push(make_source(weights()), weight_version="old")
        engine.stuck = True
        with pytest.raises(
            DeadlineExceeded, match=r"Stuck\.start_weight_update: no answer"
        ) as caught:
            session.push(make_source(weights(1)), weight_version="new")
        # What is called next waits behind it, and says so.
        assert "behind start_weight_update" in all_told(caught.value)["Stuck"]
        engine.stuck = False
        engine.go.set()
        session.push(make_source(weights(2)))
        assert holds(engine, weights(2))


def test_a_call_that_was_given_up_before_its_turn_does_not_happen():
    class Target:
        calls: list[str]

        def slow(self):
            self.calls.append("slow")
            go.wait()

        def fast(self):
            self.calls.append("fast")

    go, target = threading.Event(), Target()
    target.calls = []
    calls = LocalCalls(target, "it")
    try:
        with pytest.raises(DeadlineExceeded, match=r"no answer after 0\.1 s$"):
            calls.call("slow", 0.1)
        with pytest.raises(DeadlineExceeded, match="behind slow, which does not end"):
            calls.call("fast", 0.1)
        waiter = threading.Timer(0.2, calls.cancel)
        waiter.start()
        with pytest.raises(ServerUnreachable, match=r"it\.fast: cancelled"):
            calls.call("fast", None)
        go.set()
        calls.call("fast", 5)
        assert target.calls == ["slow", "fast"]
    finally:
        go.set()
        calls.close()


def test_a_timeout_of_the_method_s_own_is_no_deadline():
    class Target:
        def late(self):
            raise TimeoutError("mine")

    calls = LocalCalls(Target(), "it")
    with pytest.raises(ServerRefused, match=r"it\.late: TimeoutError: mine"):
        calls.call("late", 5)
    calls.close()


def test_a_coroutine_is_cancelled_at_its_deadline():
    """Or else the next call would wait for its end."""
    cancelled = threading.Event()

    class Slow:
        async def hang(self):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def answer(self):
            return "yes"

    async def main():
        calls = LocalCalls(Slow(), "Slow", asyncio.get_running_loop())
        with pytest.raises(DeadlineExceeded, match=r"^Slow\.hang: no answer after 0\.2 s$"):
            await asyncio.to_thread(calls.call, "hang", 0.2)
        assert await asyncio.to_thread(calls.call, "answer", 5) == "yes"
        calls.close()

    asyncio.run(main())
    assert cancelled.is_set()
