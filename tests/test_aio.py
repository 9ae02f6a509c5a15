"""Pushes for asyncio: the loop goes on, and a cancelled push leaves no server stuck."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time

import pytest

import streamer
from streamer import PushCancelled, ServerRefused, Timeouts, UsageError
from streamer.drivers.mark import INCOMPLETE
from streamer.events import ChunkSent, SyncFailed, SyncFinished, SyncStarted

pytestmark = pytest.mark.usefixtures("no_threads_left")

TIMEOUTS = Timeouts(connect=30, progress=20)
OPTIONS = {"timeouts": TIMEOUTS, "buffer_size": 4000, "num_buffers": 2}
SOON = 10.0
"""Seconds within which a cancelled push has to have cleaned up, on a busy machine."""


async def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Lag:
    """The longest time, in seconds, for which the event loop did not get to its next task."""

    async def __aenter__(self):
        self.longest = 0.0
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def _tick(self):
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest = max(self.longest, time.monotonic() - started - 0.005)

    async def __aexit__(self, *_):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def test_pushes_one_after_another(server, weights, make_source):
    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            for step in range(3):
                report = await session.apush(
                    make_source(weights(step)), weight_version=f"step-{step}"
                )
                assert report.weight_version == server.weight_version == f"step-{step}"
                assert server.holds(weights(step))
        report = await streamer.apush(make_source(weights(7)), server.url)
        assert report.tensors == 20
        assert server.holds(weights(7))

    asyncio.run(main())


def test_the_event_loop_is_not_blocked(server, weights, make_source):
    """While the source sleeps, and while a server is slow to join, to begin and to finish."""
    pause = 1.5
    slow = make_source(weights(1), on_step=lambda index: time.sleep(pause if index == 10 else 0))
    server.fail("/init_weight_transfer_engine", 0, delay=pause)
    server.fail("/pause", 0, delay=pause, keep=True)
    server.fail("/finish_weight_update", 0, delay=pause, keep=True)

    async def main():
        started = time.monotonic()
        async with Lag() as lag, streamer.aconnect(server.url, **OPTIONS) as session:
            await session.apush(slow)
        assert time.monotonic() - started > 4 * pause
        return lag.longest

    longest = asyncio.run(main())
    print(f"the loop's longest lag: {longest * 1e3:.1f} ms")
    assert longest < pause / 3
    assert server.holds(weights(1))


def test_events_come_on_the_thread_of_the_loop(server, weights, make_source):
    seen = []

    def on_event(event):
        assert asyncio.get_running_loop()
        seen.append((type(event), threading.current_thread()))

    async def main():
        async with streamer.aconnect(server.url, on_event=on_event, **OPTIONS) as session:
            await session.apush(make_source(weights(0)))
            kinds = [kind for kind, _ in seen]
            assert kinds[0] == SyncStarted
            assert kinds[-1] == SyncFinished
            assert set(kinds[1:-1]) == {ChunkSent}

    asyncio.run(main())
    assert {thread for _, thread in seen} == {threading.main_thread()}


def test_context_variables_are_those_of_the_task(server, weights, make_source):
    step = contextvars.ContextVar("step")
    seen = []

    async def main():
        step.set("seven")
        source = make_source(weights(0), on_step=lambda index: seen.append(step.get()))
        await streamer.apush(source, server.url)

    asyncio.run(main())
    assert set(seen) == {"seven"}


def test_a_failure_is_raised_as_from_push(server, weights, make_source):
    server.fail("/start_weight_update")

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            with pytest.raises(ServerRefused, match="made to fail"):
                await session.apush(make_source(weights(0)))
            await session.apush(make_source(weights(1)))

    asyncio.run(main())
    assert server.holds(weights(1))


def test_one_push_at_a_time(server, weights, make_source):
    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            slow = make_source(weights(0), on_step=lambda index: time.sleep(0.05))
            first = asyncio.create_task(session.apush(slow))
            await asyncio.sleep(0.2)
            with pytest.raises(UsageError, match="at work already: await"):
                await session.apush(make_source(weights(1)))
            await first

    asyncio.run(main())
    assert server.holds(weights(0))


# Cancelled.


async def cancel(task):
    """Cancel ``task`` once; the error it ends with, and after how long."""
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert task.cancelled()
    return caught.value, time.monotonic() - started


MOMENTS = {
    # route that is slow, calls that must have come by then, what the servers hold afterwards
    "probe": ("/version", "GET /version", "old"),
    "join": ("/init_weight_transfer_engine", "POST /init_weight_transfer_engine", "old"),
    "pause": ("/pause", "POST /pause", "old"),
    "start": ("/start_weight_update", "POST /start_weight_update", "old"),
    "finish": ("/finish_weight_update", "POST /finish_weight_update", "new"),
    "resume": ("/resume", "POST /resume", "new"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancelled_while_a_server_is_slow(server, weights, make_source, moment):
    route, call, held = MOMENTS[moment]

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            await session.apush(make_source(weights(0)), weight_version="old")
            if moment in ("probe", "join"):
                await asyncio.to_thread(session._fleet.leave)
            server.fail(route, 0, delay=2)
            push = asyncio.create_task(session.apush(make_source(weights(1)), weight_version="new"))
            await until(lambda: call in server.calls)
            error, seconds = await cancel(push)
            assert seconds < SOON
            if held == "new":
                assert error.__notes__ == ["it had been completed by then"]
            else:
                assert error.__notes__[0].startswith("the push was cancelled")
            assert server.holds(weights(1 if held == "new" else 0))
            if moment in ("pause", "start"):  # which may still be carried out
                assert server.weight_version.startswith(f"{INCOMPLETE}new#")
            else:
                assert server.weight_version == held
                assert not server.paused
            await session.apush(make_source(weights(2)))
            assert server.holds(weights(2))
            assert not server.paused

    asyncio.run(main())


@pytest.mark.parametrize("asleep", [True, False], ids=["in the source", "between its tensors"])
def test_cancelled_in_the_middle_of_the_stream(server, weights, make_source, asleep):
    """A mixture is there: the server stays paused and marked, and the next push cures it."""
    half = threading.Event()

    def on_step(index):
        if index >= 10:
            half.set()
            time.sleep(1 if asleep else 0.02)

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            await session.apush(make_source(weights(0)), weight_version="old")
            push = asyncio.create_task(
                session.apush(make_source(weights(1), on_step=on_step), weight_version="new")
            )
            await until(half.is_set)
            async with Lag() as lag:
                error, seconds = await cancel(push)
            assert seconds < SOON
            assert lag.longest < 0.5
            assert f"{server.url} holds a mixture of old and new weights" in error.__notes__[0]
            assert server.weight_version.startswith(f"{INCOMPLETE}new#")
            assert server.paused
            await session.apush(make_source(weights(2)), weight_version="next")
        assert server.holds(weights(2))
        assert server.weight_version == "next"
        assert not server.paused

    asyncio.run(main())


def test_a_second_cancellation_ends_what_the_first_one_waits_for(
    start_server, weights, make_source
):
    server = start_server()

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            # It receives all, and does not answer.
            server.fail("/update_weights", 500, delay=600, inside=True)
            push = asyncio.create_task(session.apush(make_source(weights(1))))
            await until(lambda: "POST /update_weights" in server.calls)
            push.cancel()
            await asyncio.sleep(1)
            assert not push.done()
            error, seconds = await cancel(push)
            assert seconds < SOON
            assert "holds a mixture" in error.__notes__[0]
            await session.apush(make_source(weights(2)))
        assert server.holds(weights(2))

    asyncio.run(main())


def test_a_timeout_of_asyncio_s(server, weights, make_source):
    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            slow = make_source(weights(0), on_step=lambda index: time.sleep(0.2))
            started = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.7):
                    await session.apush(slow)
            assert 0.7 <= time.monotonic() - started < SOON
            assert "the push was cancelled" in caught.value.__cause__.__notes__[0]
            assert not asyncio.current_task().cancelling()
            await session.apush(make_source(weights(1)))
        assert server.holds(weights(1))

    asyncio.run(main())


def test_a_task_group_ends_its_push(server, weights, make_source):
    half = threading.Event()

    def on_step(index):
        half.set()
        time.sleep(0.05)

    async def fail():
        await until(half.is_set)
        raise ValueError("elsewhere")

    async def both():
        slow = make_source(weights(0), on_step=on_step)
        async with asyncio.TaskGroup() as group:
            group.create_task(streamer.apush(slow, server.url))
            group.create_task(fail())

    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert [type(error) for error in caught.value.exceptions] == [ValueError]
        await streamer.apush(make_source(weights(1)), server.url)

    asyncio.run(main())
    assert server.holds(weights(1))
    assert not server.paused


def test_a_thread_that_cannot_be_started(server, weights, make_source, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "streamer-push":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start"):
                    await session.apush(make_source(weights(1)))
            await session.apush(make_source(weights(1)))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert server.holds(weights(1))


def test_connecting_can_be_cancelled(server):
    server.fail("/init_weight_transfer_engine", 0, delay=3)

    async def main():
        async def connect():
            async with streamer.aconnect(server.url, **OPTIONS):
                pytest.fail("it was cancelled")

        task = asyncio.create_task(connect())
        await until(lambda: "POST /init_weight_transfer_engine" in server.calls)
        _, seconds = await cancel(task)
        assert seconds < SOON

    asyncio.run(main())


def test_ten_cancelled_pushes_leak_nothing(server, weights, make_source, leaks, eventually):
    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            before = None
            for turn in range(10):
                half = threading.Event()

                def on_step(index, half=half):
                    half.set()
                    time.sleep(0.01)

                push = asyncio.create_task(
                    session.apush(make_source(weights(turn), on_step=on_step))
                )
                await until(half.is_set)
                await cancel(push)
                await session.apush(make_source(weights(turn)))
                before = before or leaks()
            # What asyncio's own pool of threads grows by is less than one a turn.
            eventually(lambda: all(now < before[name] + 5 for name, now in leaks().items()))

    asyncio.run(main())


def test_a_push_of_another_thread_is_cancelled_too(server, weights, make_source):
    events, caught = [], []
    half = threading.Event()

    def on_step(index):
        if index == 10:
            half.set()
        time.sleep(0.05)

    with streamer.connect(server.url, on_event=events.append, **OPTIONS) as session:
        session.cancel()  # nothing is under way: the next push knows nothing of it

        def push():
            with pytest.raises(PushCancelled) as error:
                session.push(make_source(weights(0), on_step=on_step), weight_version="new")
            caught.append(error.value)

        thread = threading.Thread(target=push)
        thread.start()
        assert half.wait(20)
        session.cancel()
        thread.join(SOON)
        assert not thread.is_alive()
        assert "holds a mixture" in str(caught[0].held[server.url])
        assert isinstance(events[-1], SyncFailed)
        assert events[-1].error is caught[0]
        session.push(make_source(weights(1)))
        assert server.holds(weights(1))


def test_an_error_in_the_block_ends_the_push_of_another_task(server, weights, make_source):
    caught, sessions = [], []
    half = threading.Event()

    def on_step(index):
        if index == 10:  # more than the buffers hold: bytes have gone out
            half.set()
        time.sleep(0.02)

    async def push(session):
        try:
            await session.apush(make_source(weights(1), on_step=on_step))
        except PushCancelled as error:
            caught.append(error)

    async def main():
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            sessions.append(session)
            await session.apush(make_source(weights(0)))
            task = asyncio.create_task(push(session))
            await until(half.is_set)
            raise ValueError("my own bug")
        await task

    with pytest.raises(ValueError, match="my own bug"):
        asyncio.run(main())
    assert server.url in caught[0].held
    with pytest.raises(UsageError, match="closed"):
        sessions[0].push(make_source(weights(0)))
    streamer.push(make_source(weights(2)), server.url, **OPTIONS)
    assert server.holds(weights(2))


def test_to_close_a_session_ends_the_push_of_another_thread(server, weights, make_source):
    caught = []
    half = threading.Event()

    def on_step(index):
        if index == 10:  # more than the buffers hold: bytes have gone out
            half.set()
        time.sleep(0.02)

    session = streamer.connect(server.url, **OPTIONS)
    session.push(make_source(weights(0)))

    def push():
        with pytest.raises(PushCancelled) as error:
            session.push(make_source(weights(1), on_step=on_step))
        caught.append(error.value)

    thread = threading.Thread(target=push)
    thread.start()
    assert half.wait(20)
    session.close()
    thread.join(20)
    assert server.url in caught[0].held
    streamer.push(make_source(weights(2)), server.url, **OPTIONS)
    assert server.holds(weights(2))


def test_a_push_does_not_close_its_own_session(server, weights, make_source):
    session = streamer.connect(server.url, **OPTIONS)
    errors = []

    def on_step(index):
        if index == 1:
            with pytest.raises(UsageError, match="still under way") as error:
                session.close()
            errors.append(error.value)

    session.push(make_source(weights(0), on_step=on_step))
    session.close()
    assert len(errors) == 1


def test_cancelled_while_a_push_of_another_task_ends(server, weights, make_source):
    """The session is closed all the same."""
    half, sessions = threading.Event(), []

    def on_step(index):
        if index == 10:
            half.set()
            time.sleep(1.0)  # the push ends when its source goes on

    async def push(session):
        with contextlib.suppress(PushCancelled):
            await session.apush(make_source(weights(1), on_step=on_step))

    async def leave(tasks):
        async with streamer.aconnect(server.url, **OPTIONS) as session:
            sessions.append(session)
            tasks.append(asyncio.create_task(push(session)))
            await until(half.is_set)

    async def main():
        tasks = []
        task = asyncio.create_task(leave(tasks))
        await until(half.is_set)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await tasks[0]

    asyncio.run(main())
    with pytest.raises(UsageError, match="closed"):
        sessions[0].push(make_source(weights(0)))
    streamer.push(make_source(weights(2)), server.url, **OPTIONS)
    assert server.holds(weights(2))
