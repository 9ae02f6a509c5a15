"""A session: one trainer, any number of servers, sync after sync.

This is the one place where sources, plan, drivers and transport meet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from streamer.aio import AGAIN_SECONDS, at_once, beside
from streamer.announce import announced
from streamer.drivers.base import Driver, ServerInfo
from streamer.drivers.engine import Engine
from streamer.drivers.factory import Servers, listed, make_driver, refuse_on_own_loop
from streamer.drivers.vllm import check_version
from streamer.events import ChunkSent, Event, SyncFailed, SyncFinished, SyncStarted
from streamer.exceptions import PushCancelled, StreamerError, UsageError
from streamer.follower import follow
from streamer.group import Group
from streamer.interrupts import Interrupts
from streamer.options import ConnectOptions, Options
from streamer.plan import Plan, make_plan
from streamer.ranks import Leader, several_ranks
from streamer.registry import default_registry, open_source
from streamer.report import Report, ServerReport, make_report
from streamer.source import (
    WeightSource,
    checked,
    close_source,
    ranks_of,
    specs_of,
    version_of,
)
from streamer.timeouts import Clock

log = logging.getLogger("streamer")


class Session:
    """Servers that weights are pushed to. Make one with `connect`; close it, or use ``with``.

    A session is used by one thread at a time. After a failed push it can be used again: the next
    push reconnects.
    """

    def __init__(self, to: Servers | None, **options: Unpack[ConnectOptions]) -> None:
        servers = listed(to)
        self._engines = [server for server in servers if isinstance(server, Engine)]
        self._options = Options.parse(options)
        self._clock = Clock(self._options.timeouts)
        self._drivers: list[Driver] = [
            make_driver(server, self._options, self._clock) for server in servers
        ]
        if len(set(self._urls)) != len(servers):
            raise UsageError(f"give several servers, each one once: {', '.join(self._urls)}")
        self.deliver: Callable[[Callable[[], None]], object] = at_once
        """Calls ``on_event``; `apush` has that done on the thread of its event loop."""
        self.turn = threading.Lock()
        """Held while `apush` works on a thread."""
        self._closed = False
        self._pushing = threading.Lock()
        self._pusher: int | None = None
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(2 * len(servers) or 1, thread_name_prefix="streamer-http")
        self._interrupts = Interrupts(self._abort)
        self._group: Group | None = None
        self._kept: Plan | None = None  # of the last push: the next one is often the same
        self._opened = 0.0
        self.servers: list[ServerInfo] = []

    def push(
        self, source: object, *, weight_version: str | None = None, force: bool = False
    ) -> Report:
        """Send every tensor of ``source`` to every server, and return a report.

        ``source`` is what `streamer.open_source` takes. Everything that can be checked is checked
        before the first call that changes anything on a server. The servers serve the new weights
        when this returns. If it raises before a byte was sent they serve the old ones; after that
        they stay paused and marked as incomplete, and ``error.held`` says what each may hold.

        Without ``weight_version`` the source's own is used (a Hub commit), or one is made up.
        Servers that all say they serve the source's own version already are left alone, unless
        ``force``; the report then counts 0 tensors.

        A source with ``ranks`` is pushed by all of them at the same time. Those that do not send
        contact no server, and return the sender's report. If one fails in here, all raise. One that
        fails before, in `connect`, say, or in code of the trainer, is waited for by the others for
        the connect timeout.
        """
        with self._alone():
            return self._run(source, weight_version, force)

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
        started = time.monotonic()
        trace = self._options.trace
        opened: WeightSource | None = None
        try:
            with announced(source), trace.span("open source"):
                self._refuse_if_closed()
                refuse_on_own_loop(self._engines)
                check_version(weight_version)
                opened = open_source(source)
            ranks = ranks_of(opened)
            if ranks is not None and not ranks.sends:
                return self._follow(opened)
            with Leader(opened, self._clock) as leader:
                with trace.span("plan"):
                    plan = self._plan(opened)
                    leader.begin(plan)
                self._opened = time.monotonic()
                report = self._lead(plan, opened, weight_version, force, started, leader)
                leader.finish(report)
                return report
        except BaseException as error:
            told = self._interrupts.told(error)
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
        return await beside(self, step)

    def _follow(self, source: WeightSource) -> Report:
        with self._interrupts:
            report = follow(source, self._clock, self._interrupts.check)
        self._tell(SyncFinished(report))
        return report

    def _plan(self, source: WeightSource) -> Plan:
        if not self._drivers:
            raise UsageError("this process sends, and needs a server: give its URL, not None")
        specs = specs_of(source)
        if not specs:
            raise StreamerError("the source has no tensors: nothing to send")
        if self._kept is None or self._kept.specs != specs:
            self._kept = make_plan(
                specs, packed=self._options.packed, buffer_size=self._options.buffer_size
            )
        return self._kept

    def _lead(
        self,
        plan: Plan,
        source: WeightSource,
        weight_version: str | None,
        force: bool,
        started: float,
        leader: Leader,
    ) -> Report:
        joined = self._is_joined()
        if not joined:
            self._probe()
        version = weight_version or version_of(source)
        check_version(version)
        if version is None:
            version = f"streamer-{uuid.uuid4().hex[:12]}"
        elif weight_version is None and not force and self._all_serve(version):
            return self._report(None, version, started, [time.monotonic()] * 3)
        for driver in self._drivers:
            driver.check(plan)
        if not joined:
            self._join()
        connected = time.monotonic()
        self._tell(SyncStarted(plan.tensors, plan.nbytes, len(plan.chunks), self._urls))
        with self._interrupts:
            try:
                self._update(plan, source, version, leader)
                updated = time.monotonic()
                sent = self._group.sent if self._group is not None else None
                self._each(lambda driver: driver.commit(version, sent))
            except BaseException as error:
                leader.fail(error)
                self._give_up(error)
                raise
        return self._report(plan, version, started, [connected, updated, time.monotonic()])

    def _is_joined(self) -> bool:
        """Whether the servers are as we left them, and their workers in our group, all of them.

        The workers answer while the servers are asked.
        """
        group = self._group
        if group is None or group.transport.aborted:
            return False
        group.call_roll()
        ours = all(self._each(lambda driver: driver.is_ours()))
        return ours and group.is_whole(self._interrupts.check_request)

    def _all_serve(self, version: str) -> bool:
        return all(self._each(lambda driver: driver.serves(version)))

    def _report(
        self, plan: Plan | None, version: str, started: float, marks: list[float]
    ) -> Report:
        """``marks``: when the group was connected, the last byte received, the servers resumed."""
        servers = [
            ServerReport(
                server.url, server.world_size, server.version, driver.verified if plan else None
            )
            for driver, server in zip(self._drivers, self.servers, strict=True)
        ]
        verify = self._verify_seconds() if plan else 0.0
        report = make_report(plan, version, [started, self._opened, *marks], verify, servers)
        self._tell(SyncFinished(report))
        return report

    def _verify_seconds(self) -> float:
        group = self._group.verify_seconds if self._group is not None else 0.0
        return group + max(driver.verify_seconds for driver in self._drivers)

    def join(self) -> None:
        """Make every worker join a fresh broadcast group. Done by a push if need be."""
        with self._alone():
            self._refuse_if_closed()
            refuse_on_own_loop(self._engines)
            self._interrupts.requested = False
            self._probe()
            self._join()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError("the session is closed: connect again")

    def _probe(self) -> None:
        self._interrupts.check_request()
        self.servers = self._each(lambda driver: driver.probe())

    def _join(self) -> None:
        self._interrupts.check_request()
        self._leave()
        self._group = Group(self._drivers, self.servers, self._options, self._clock, self._pool)

    def _update(self, plan: Plan, source: WeightSource, version: str, leader: Leader) -> None:
        assert self._group is not None
        payloads = checked(source, plan.specs)

        def on_progress(nbytes: int) -> None:
            self._tell(ChunkSent(min(nbytes, plan.nbytes), plan.nbytes))

        def check() -> None:
            self._interrupts.check()
            self._clock.check()
            leader.check()

        # No signal breaks into a collective that other ranks are in.
        within = self._interrupts.within if leader.alone else leader.within
        with contextlib.closing(payloads):
            self._group.sync(
                plan,
                within(payloads),
                lambda: self._each(lambda driver: driver.begin(version)),
                on_progress,
                check,
                source=source,
            )

    def _give_up(self, error: BaseException) -> None:
        """A sync failed: release the servers if no byte was sent; else say what each one holds."""
        group = self._group
        if group is None:
            return  # `close` has waited long enough for this push, and cleaned up
        if not group.flowing:
            self._clean_up(error, lambda driver: driver.release())
            return
        broken = group.transport.aborted
        if broken:
            # First our end: workers that still wait for the trainer cannot answer before that.
            self._drop_group()
        held: dict[str, str] = {}

        def abandon(driver: Driver) -> None:
            held[driver.url] = driver.abandon()

        self._clean_up(error, abandon)
        if isinstance(error, StreamerError):
            error.held = held
        else:
            for url, state in held.items():
                error.add_note(f"{url} {state}")
        if broken:
            self._clean_up(error, lambda driver: driver.leave())

    def _clean_up(
        self,
        error: BaseException,
        step: Callable[[Driver], None],
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``step`` on every server, and ``beside`` on this thread meanwhile; what goes wrong
        with a server becomes a note on ``error``."""
        begun = [(driver, self._begin(step, driver)) for driver in self._drivers]
        beside()
        for driver, result in begun:
            try:
                result()
            except StreamerError as problem:
                error.add_note(f"while cleaning up {driver.url}: {problem}")

    def _begin(self, step: Callable[[Driver], None], driver: Driver) -> Callable[[], None]:
        """Run ``step`` on a thread, and return what waits for it. Runs it in that call where the
        interpreter exits, in an atexit handler, say, and starts no thread any more."""
        try:
            return self._pool.submit(step, driver).result
        except RuntimeError:
            return partial(step, driver)

    def _each(self, step: Callable[[Driver], Any]) -> list[Any]:
        """Run ``step`` on every server at once; when all are through, raise the first error."""
        futures = [self._pool.submit(step, driver) for driver in self._drivers]
        try:
            wait(futures)
        except BaseException:
            for driver in self._drivers:
                driver.cancel()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _tell(self, event: Event) -> None:
        if self._options.on_event is not None:
            self.deliver(partial(_observe, self._options.on_event, event))
        for problem in default_registry().call_on_event(event):
            log.error("a plugin's streamer_on_event failed", exc_info=problem)

    @property
    def _urls(self) -> tuple[str, ...]:
        return tuple(driver.url for driver in self._drivers)

    def _leave(self) -> None:
        """Have the workers leave, so that they or others can join again."""
        if self._group is None:
            return
        problem = StreamerError("leaving")
        # One after the other took a second with vLLM's own engine (docs/measurements.md).
        self._clean_up(problem, lambda driver: driver.leave(), beside=self._drop_group)
        for note in getattr(problem, "__notes__", []):
            log.warning("%s", note)

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
        inside, group = self._interrupts.inside, self._group
        if inside and group is not None:
            group.stop(PushCancelled("the push was cancelled"))
        if insist:
            self._abort()
        if insist or not inside:
            for driver in self._drivers:
                driver.cancel()

    def _abort(self) -> None:
        if self._group is not None:
            self._group.transport.abort("interrupted")

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

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
            self._leave()
            for driver in self._drivers:
                driver.close()
            self._pool.shutdown(wait=True, cancel_futures=True)
        finally:
            if idle:
                self._pushing.release()

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


def connect(to: Servers | None, **options: Unpack[ConnectOptions]) -> Session:
    """Connect to the server at ``to``, or to several as one group, for any number of pushes.

    A server is a URL, or an engine: an object, or a handle of a Ray actor, see `Engine`.
    Asks each server what it is and has its workers join the broadcast group. Raises `ServerError`
    or `TransportError` if that fails; see `ConnectOptions`. In a trainer of several ranks this is
    left to the first push, whose source says which rank sends; ``to`` may be None on the others. A
    rank that is refused here tells no other: end the trainer, or they wait in their first push.
    """
    session = Session(to, **options)
    try:
        if to is not None and not several_ranks():
            session.join()
    except BaseException:
        session.close()
        raise
    return session


def push(
    source: object,
    to: Servers | None,
    *,
    weight_version: str | None = None,
    force: bool = False,
    **options: Unpack[ConnectOptions],
) -> Report:
    """Push ``source`` once: connect, send, disconnect. See `connect` and `Session.push`."""
    with announced(source):
        session = Session(to, **options)
    with session:
        return session.push(source, weight_version=weight_version, force=force)
