"""A session: one trainer, any number of servers, sync after sync.

This is the one place where sources, plan, drivers and transport meet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Unpack

from streamer.announce import announced
from streamer.drivers.base import ServerInfo
from streamer.drivers.engine import Engine
from streamer.drivers.factory import (
    Servers,
    listed,
    make_driver,
    refuse_on_own_loop,
    refuse_one_twice,
)
from streamer.drivers.mark import check_weight_version
from streamer.events import Event, SyncFailed, SyncFinished
from streamer.exceptions import (
    PushCancelled,
    SourceError,
    StreamerError,
    UsageError,
    forget_locals,
)
from streamer.fleet import Fleet
from streamer.follower import follow
from streamer.held import Held
from streamer.interrupts import Interrupts
from streamer.leader import Leader
from streamer.options import ConnectOptions, Options
from streamer.plan import Plan, make_plan
from streamer.registry import default_registry, open_source
from streamer.report import Report, Stopwatch
from streamer.source import WeightSource, close_source, ranks_of, specs_of, version_of
from streamer.sync import Sync
from streamer.timeouts import Clock
from streamer.turn import AGAIN_SECONDS, Turn

log = logging.getLogger("streamer")


class Session:
    """Servers that weights are pushed to. Make one with `connect`; close it, or use ``with``.

    A session is used by one thread at a time. After a failed push it can be used again: the next
    push reconnects.
    """

    def __init__(self, to: Servers | None, **options: Unpack[ConnectOptions]) -> None:
        self._options = Options.parse(options)
        self._clock = Clock(self._options.timeouts)
        servers = listed(to)
        self._engines = [server for server in servers if isinstance(server, Engine)]
        drivers = [make_driver(server, self._options, self._clock) for server in servers]
        self._fleet = Fleet(drivers, self._options, self._clock)
        self._turn = Turn()
        self._closed = False
        self._pushing = threading.Lock()
        self._pusher: int | None = None
        self._process = os.getpid()
        self._interrupts = Interrupts(self._fleet.wake, self._fleet.insist)
        self._kept: Plan | None = None  # of the last push: the next one is often the same

    @property
    def servers(self) -> list[ServerInfo]:
        """What the servers said they are, when they were last asked."""
        return self._fleet.servers

    def push(
        self, source: object, *, weight_version: str | None = None, force: bool = False
    ) -> Report:
        """Send every tensor of ``source`` to every server, and return a report.

        ``source`` is what `streamer.open_source` takes. Everything that can be checked is checked
        before the first call that changes anything on a server. The servers serve the new weights
        when this returns. If it raises before a byte was sent they serve the old ones; after that
        they stay paused and marked as incomplete, unless all had arrived and what failed is one of
        the trainer's other ranks. ``error.held`` says what each holds.

        Without ``weight_version`` the source's own is used (a Hub commit), or one is made up.
        Servers that all say they serve the source's own version already are left alone, unless
        ``force``; the report then counts 0 tensors.

        A source with ``ranks`` is pushed by all of them at the same time. Those that do not send
        contact no server, and return the sender's report. If one fails in here, all raise. One that
        fails before, in `connect`, say, or in code of the trainer, is waited for by the others for
        the connect timeout. All raise, too, if the ``weight_version`` of a rank, or its source's,
        is not that of rank 0, where both have one: they are at different steps.
        """
        try:
            with self._alone():
                return self._run(source, weight_version, force)
        except BaseException as error:
            forget_locals(error)
            raise
        finally:
            del source  # an error keeps this frame

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The block is the one push, or joining, of this session, in the process that made it."""
        if os.getpid() != self._process:
            raise UsageError(
                "this session was made by another process, before a fork: connect here"
            )
        if not self._pushing.acquire(blocking=False):
            raise UsageError(
                "a push of this session is under way: wait for it, or connect a second session"
            )
        self._pusher = threading.get_ident()
        try:
            yield
        finally:
            self._pusher = None
            self._pushing.release()

    def _run(self, source: object, weight_version: str | None, force: bool) -> Report:
        self._clock.start()
        self._interrupts.requested = False
        trace = self._options.trace
        watch = Stopwatch(trace)
        opened: WeightSource | None = None
        try:
            with announced(source), trace.span("open source"):
                self._refuse_if_closed()
                refuse_on_own_loop(self._engines)
                check_weight_version(weight_version)
                opened = open_source(source)
            ranks = ranks_of(opened)
            if ranks is not None and not ranks.sends:
                report = self._follow(opened, weight_version)
            else:
                report = self._lead(opened, weight_version, force, watch)
            self._tell(SyncFinished(report))
            return report
        except BaseException as error:
            told = self._interrupts.told(self._clock.told(error))
            self._tell(SyncFailed(told))
            if told is not error:
                raise told from error
            raise
        finally:
            self._clock.stop()
            if opened is not None and opened is not source:
                close_source(opened)

    async def apush(
        self, source: object, *, weight_version: str | None = None, force: bool = False
    ) -> Report:
        """`push` for asyncio, which runs on a thread of its own: see `streamer.aio`."""
        step = partial(self.push, source, weight_version=weight_version, force=force)
        try:
            return await self._turn.beside(step, self.cancel)
        finally:
            del source, step  # an error keeps this frame

    def _follow(self, source: WeightSource, weight_version: str | None) -> Report:
        with self._interrupts:
            version = weight_version or version_of(source)
            return follow(source, self._clock, self._interrupts.check, version)

    def _lead(
        self, source: WeightSource, weight_version: str | None, force: bool, watch: Stopwatch
    ) -> Report:
        with Leader(source, self._clock, self._interrupts.check) as leader:
            with leader.holding(self._interrupts), self._options.trace.span("plan"):
                if not self._fleet.drivers:
                    raise UsageError(
                        "this process sends, and needs a server: give its URL, not None"
                    )
                leader.meet()
                plan = self._plan(source)
                leader.begin(plan, weight_version or version_of(source))
            watch.lap("open")
            sync = Sync(self._fleet, plan, leader, self._clock, self._interrupts, self._tell)
            report = sync.run(source, weight_version, force, watch)
            try:
                with leader.holding(self._interrupts):
                    leader.finish(report)
            except StreamerError as error:
                holds = Held("holds the new weights, and answers with them")
                error.held = dict.fromkeys(self._fleet.urls, holds)
                raise
            return report

    def _plan(self, source: WeightSource) -> Plan:
        specs = specs_of(source)
        if not specs:
            raise SourceError("the source has no tensors: nothing to send")
        if self._kept is None or self._kept.specs != specs:
            self._kept = make_plan(
                specs, packed=self._options.packed, buffer_size=self._options.buffer_size
            )
        return self._kept

    def join(self) -> None:
        """Make every worker join a fresh broadcast group. Done by a push if need be."""
        with self._alone():
            self._refuse_if_closed()
            refuse_on_own_loop(self._engines)
            self._interrupts.requested = False
            self._fleet.probe()
            refuse_one_twice(self._fleet.servers)
            self._interrupts.check_request()
            self._fleet.join()

    async def ajoin(self) -> None:
        """`join` for asyncio, as `apush`."""
        await self._turn.beside(self.join, self.cancel)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError("the session is closed: connect again")

    def _tell(self, event: Event) -> None:
        if self._options.on_event is not None:
            self._turn.deliver(partial(_observe, self._options.on_event, event))
        for problem in default_registry().call_on_event(event):
            log.error("a plugin's streamer_on_event failed", exc_info=problem)

    def cancel(self, *, insist: bool = False) -> None:
        """From another thread: end the push under way as a signal does, and come back at once.

        It raises `PushCancelled` when its servers are released, or marked and left paused, as after
        any failure. What it waits for is woken, but not the code of a source: the broadcast is
        completed with filler meanwhile, and the push ends when the source goes on. An update that
        is being closed already is completed. With ``insist`` the transport is aborted as well, as
        by a second signal, and calls to the servers are given up, which may take a moment. Where no
        push is under way this does nothing.
        """
        self._interrupts.requested = True
        inside, group = self._interrupts.inside, self._fleet.group
        if inside and group is not None:
            group.stop(PushCancelled("the push was cancelled"))
        if insist:
            self._fleet.insist()
        elif inside:
            self._fleet.wake()
        else:
            self._fleet.cancel()

    def close(self) -> None:
        """Leave the servers and free all memory and threads. Idempotent; never raises for a server
        that is gone: what goes wrong is logged.

        A push of another thread is cancelled first, and waited for, at most for the progress
        timeout: it may be inside a source that does not come back.
        """
        if self._pusher == threading.get_ident():
            raise UsageError("this push is still under way: close the session when it has returned")
        self._closed = True
        if os.getpid() != self._process:
            return  # after a fork neither the threads nor the servers are this process's
        deadline = time.monotonic() + self._options.timeouts.progress
        while not (idle := self._pushing.acquire(timeout=AGAIN_SECONDS)):
            if time.monotonic() > deadline:
                break
            self.cancel()
        try:
            self._fleet.close()
        finally:
            if idle:
                self._pushing.release()

    async def aclose(self) -> None:
        """`close` for asyncio; a push of another task is cancelled, and ends before."""
        await self._turn.last(self.close, self.cancel)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _observe(on_event: Callable[[Event], None], event: Event) -> None:
    try:
        on_event(event)
    except Exception:
        log.exception("the on_event of this session failed")
