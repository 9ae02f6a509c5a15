"""One push of the rank that sends: from the first question until the servers answer again."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

from streamer.drivers.factory import refuse_one_twice
from streamer.drivers.mark import check_weight_version
from streamer.events import ChunkSent, Event, SyncStarted
from streamer.fleet import Fleet
from streamer.interrupts import Interrupts
from streamer.leader import Leader
from streamer.plan import Plan
from streamer.report import Report, ServerReport, Stopwatch, make_report
from streamer.source import WeightSource, checked, version_of
from streamer.timeouts import Clock


class Sync:
    """Sends ``plan`` once, on the thread that pushes. ``leader`` has begun with that plan."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        leader: Leader,
        clock: Clock,
        interrupts: Interrupts,
        tell: Callable[[Event], None],
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._leader = leader
        self._clock = clock
        self._interrupts = interrupts
        self._tell = tell

    def run(
        self, source: WeightSource, weight_version: str | None, force: bool, watch: Stopwatch
    ) -> Report:
        """See `Session.push`. On return every server serves the new weights.

        If this raises, the servers are released or marked as it says there, and the other ranks
        are told. ``watch`` has stopped the time of opening.
        """
        fleet, interrupts = self._fleet, self._interrupts
        joined = fleet.is_joined(interrupts.check_request)
        if not joined:
            interrupts.check_request()
            fleet.probe()
            refuse_one_twice(fleet.servers)
        version = weight_version or version_of(source)
        check_weight_version(version)
        if version is None:
            version = f"streamer-{uuid.uuid4().hex[:12]}"
        elif weight_version is None and not force and fleet.serves(version):
            watch.lap("connect")
            return make_report(None, version, watch, 0.0, self._servers(sent=False))
        for driver in fleet.drivers:
            driver.check(self._plan)
        if not joined:
            interrupts.check_request()
            fleet.join()
        watch.lap("connect")
        plan = self._plan
        self._tell(SyncStarted(plan.tensors, plan.nbytes, len(plan.chunks), fleet.urls))
        assert fleet.group is not None
        interrupts.check_request()
        with interrupts, fleet.group.syncing():
            try:
                self._update(source, version)
                watch.lap("update")
                sent = fleet.group.sent if fleet.group is not None else None
                fleet.each(lambda driver: driver.commit(version, sent), to_the_end=True)
            except BaseException as error:
                told = self._clock.told(error)
                try:
                    self._leader.fail(told)
                finally:
                    fleet.give_up(told)
                if told is not error:
                    raise told from error
                raise
        watch.lap("finish", verify_seconds=fleet.verify_seconds)
        return make_report(plan, version, watch, fleet.verify_seconds, self._servers(sent=True))

    def _update(self, source: WeightSource, version: str) -> None:
        fleet, plan, leader = self._fleet, self._plan, self._leader
        assert fleet.group is not None
        payloads = checked(source, plan.specs)
        # No signal breaks into a collective that other ranks are in.
        within = self._interrupts.within if leader.alone else leader.within
        with contextlib.closing(payloads):
            fleet.group.sync(
                plan,
                within(payloads),
                lambda: fleet.each(lambda driver: driver.begin(version)),
                self._on_progress,
                self._check,
                source=source,
            )

    def _on_progress(self, nbytes: int) -> None:
        self._tell(ChunkSent(min(nbytes, self._plan.nbytes), self._plan.nbytes))

    def _check(self) -> None:
        self._interrupts.check()
        self._clock.check()
        self._leader.check()

    def _servers(self, *, sent: bool) -> list[ServerReport]:
        return [
            ServerReport(
                server.url,
                server.world_size,
                server.version,
                driver.verified if sent else None,
                sent and driver.paused,
            )
            for driver, server in zip(self._fleet.drivers, self._fleet.servers, strict=True)
        ]
