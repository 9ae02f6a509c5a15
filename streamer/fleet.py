"""The servers of a session: what is done on all of them at once, and the group they are in."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

from streamer.callers import Callers, no_thread, run
from streamer.drivers.base import Driver, ServerInfo
from streamer.exceptions import StreamerError, UsageError
from streamer.group import Group
from streamer.held import Held, Remedy
from streamer.options import Options
from streamer.timeouts import Clock

_GRACE_SECONDS = 2.0
"""How long the other servers have to answer, once one has failed."""
log = logging.getLogger("streamer")


class Fleet:
    """All or nothing, as far as the protocol allows: a step that fails on one server has failed.

    Every method but `cancel`, `wake` and `insist` is for the thread that pushes, or closes.
    """

    def __init__(self, drivers: Sequence[Driver], options: Options, clock: Clock) -> None:
        """``drivers``, one a server, are closed with the fleet."""
        self._options = options
        self._clock = clock
        self.drivers = drivers
        if len(set(self.urls)) != len(drivers):
            raise UsageError(f"give several servers, each one once: {', '.join(self.urls)}")
        self._callers = Callers()
        self.servers: list[ServerInfo] = []
        """What they said they are, when they were last asked."""
        self.group: Group | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(driver.url for driver in self.drivers)

    def probe(self) -> None:
        """Ask every server what it is."""
        self.servers = self.each(lambda driver: driver.probe())

    def join(self) -> None:
        """Make every worker join a fresh broadcast group, once it has left the last one."""
        self.leave()
        self.group = Group(self.drivers, self.servers, self._options, self._clock, self._submit)

    def is_joined(self, check: Callable[[], None]) -> bool:
        """Whether the servers are as we left them, and their workers in our group, all of them.

        The workers answer while the servers are asked. ``check`` may raise meanwhile.
        """
        group = self.group
        if group is None or group.transport.aborted:
            return False
        group.call_roll()
        ours = all(self.each(lambda driver: driver.is_ours()))
        return ours and group.is_whole(check)

    def serves(self, version: str) -> bool:
        """Whether every server says that it holds exactly this version, complete."""
        return all(self.each(lambda driver: driver.serves(version)))

    @property
    def verify_seconds(self) -> float:
        """What the proof of arrival of the last sync has cost, where it took longest."""
        group = self.group.verify_seconds if self.group is not None else 0.0
        return group + max(driver.verify_seconds for driver in self.drivers)

    def give_up(self, error: BaseException) -> None:
        """A sync failed: release the servers if no byte was sent, or else abandon it.

        What a server then holds, if not just the old weights as before, is in ``error.held``, or in
        the notes of an error that is none of ours.
        """
        group = self.group
        if group is None:
            return  # `close` has waited long enough for this push, and cleaned up
        flowing, broken, left = group.flowing, group.transport.aborted, self._left()
        if flowing and broken:
            # First our end: workers that still wait for the trainer cannot answer before that.
            self._drop_group()
        held: dict[str, Held] = {}

        def end(driver: Driver) -> None:
            state = driver.abandon() if flowing else driver.release()
            if state is not None:
                held[driver.url] = state

        try:
            self._clean_up(error, end)
        except BaseException as ended:  # a second Ctrl-C
            what = "may hold a mixture of weights" if flowing else "holds the old weights"
            unknown = Held(f"{what}, and may be marked incomplete and paused", Remedy.PUSH)
            for url in self.urls:
                ended.add_note(f"{url} {held.get(url, unknown)}")
            raise
        if isinstance(error, StreamerError):
            error.held = held
        else:
            for url, state in held.items():
                error.add_note(f"{url} {state}")
        if flowing and broken:
            self._clean_up(error, partial(_leave, left=left))

    def leave(self) -> None:
        """Have the workers leave, so that they or others can join again. Logs what goes wrong."""
        if self.group is None:
            return
        problem = StreamerError("leaving")
        # One after the other took a second with vLLM's own engine (docs/measurements.md).
        self._clean_up(problem, partial(_leave, left=self._left()), beside=self._drop_group)
        for note in getattr(problem, "__notes__", []):
            log.warning("%s", note)

    def _left(self) -> set[str]:
        """Servers whose workers are in our group no more: to release them would hit another's."""
        try:
            return self.group.left() if self.group is not None else set()
        except (RuntimeError, StreamerError):
            return set()

    def each(self, step: Callable[[Driver], Any], *, to_the_end: bool = False) -> list[Any]:
        """Run ``step`` on every server at once; when all are through, raise what has failed.

        Once one has failed the others are given up after a moment, unless ``to_the_end``. Of those
        that failed by themselves the first in order is raised, with notes of the others.
        """
        futures: list[Future[Any]] = []
        try:
            futures.extend(self._submit(driver, partial(step, driver)) for driver in self.drivers)
            _, others = wait(futures, return_when=FIRST_EXCEPTION)
            if others:
                _, others = wait(others, None if to_the_end else _GRACE_SECONDS)
            failed = self._failed(futures)
            while others:
                # Again and again: one may have been between two calls.
                for driver, future in zip(self.drivers, futures, strict=True):
                    if future in others:
                        driver.cancel()
                _, others = wait(others, 0.1)
        except BaseException:
            for _ in range(50):
                self.cancel()
                if not wait(futures, 0.1).not_done:
                    break
            raise
        if failed:
            (_, first), *more = failed
            for url, problem in more:
                first.add_note(f"meanwhile, {url}: {_text(problem)}")
            raise first
        return [future.result() for future in futures]

    def _failed(self, futures: Sequence[Future[Any]]) -> list[tuple[str, BaseException]]:
        """Which servers' steps have failed so far, in order."""
        pairs = zip(self.drivers, futures, strict=True)
        ended = [(driver.url, future.exception()) for driver, future in pairs if future.done()]
        return [(url, error) for url, error in ended if error is not None]

    def _submit(
        self, driver: Driver, step: Callable[[], Any], *, else_here: bool = False
    ) -> Future[Any]:
        """Run ``step``, which calls ``driver``, once, on a thread.

        Never raises: where no thread can be started the future has failed, with a `StreamerError`
        that names the limit, or ``step`` has been run in this call if it may be, ``else_here``. As
        the interpreter exits, and a thread would not begin, it is run in this call in any case.
        """
        future: Future[Any] = Future()
        if not sys.is_finalizing():
            try:
                return self._callers.submit(step)
            except RuntimeError as error:
                if not else_here:
                    future.set_exception(no_thread(driver.url, error))
                    return future
        run(future, step)
        return future

    def _clean_up(
        self,
        error: BaseException,
        step: Callable[[Driver], None],
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``step`` on every server, and ``beside`` on this thread meanwhile; what goes wrong
        with a server becomes a note on ``error``."""
        begun = [
            (driver, self._submit(driver, partial(step, driver), else_here=True))
            for driver in self.drivers
        ]
        beside()
        for driver, future in begun:
            try:
                future.result()
            except Exception as problem:  # whatever it is, it must not hide ``error``
                error.add_note(f"while cleaning up {driver.url}: {_text(problem)}")

    def cancel(self) -> None:
        """From any thread: wake every call to a server that is under way; it raises."""
        for driver in self.drivers:
            driver.cancel()

    def wake(self) -> None:
        """From any thread or signal handler: give up what a sync waits for while it begins.
        After that the stream is completed."""
        group = self.group
        if group is not None:
            _beside(partial(group.while_beginning, self.cancel))

    def insist(self) -> None:
        """From any thread or signal handler: end the broadcast and the calls under way."""
        group = self.group
        if group is not None:
            group.transport.abort("interrupted")
        _beside(self.cancel)

    def _drop_group(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Leave the servers, and drop connections and threads."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._callers.close)
            for driver in self.drivers:
                ends.callback(driver.close)
            self.leave()


def _leave(driver: Driver, *, left: set[str]) -> None:
    if driver.url not in left:
        driver.leave()


def _beside(step: Callable[[], None]) -> None:
    """A handler of signals runs on a thread that may hold the lock that ``step`` waits for."""
    threading.Thread(target=step, name="streamer-cancel", daemon=True).start()


def _text(error: BaseException) -> str:
    if isinstance(error, StreamerError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
