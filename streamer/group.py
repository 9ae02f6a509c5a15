"""The broadcast group of a session: servers that have joined, the transport, the broadcaster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.digest import StreamDigest
from streamer.drivers.base import Driver, JoinInfo, ServerInfo
from streamer.exceptions import TransportError
from streamer.gpus import refuse_if_nccl_says_so
from streamer.options import Options
from streamer.plan import Call, Plan
from streamer.racing import ANSWER_SECONDS, Race, Submit
from streamer.rendezvous import make_transport
from streamer.source import Payload, WeightSource
from streamer.timeouts import Clock
from streamer.transport.store import SILENCE_SECONDS
from streamer.verify import Member, Sent, compare

_UNTAKEN_SECONDS = 5.0
"""How long bytes may be on their way that every server says it has received."""


class Group:
    """Rank 0 of a broadcast group over all workers of all servers."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        servers: Sequence[ServerInfo],
        options: Options,
        clock: Clock,
        submit: Submit,
    ) -> None:
        self._drivers = drivers
        self._clock = clock
        self.world_size = 1 + sum(server.world_size for server in servers)
        self.flowing = False
        self._beginning = False
        self._turn = threading.Lock()  # held while that changes, or is acted upon
        self.sent: Sent | None = None
        self.verify_seconds = 0.0
        self._verify = options.verify
        self._verified = 0  # calls so far
        self._members: list[Member] = []
        self.broadcaster: Broadcaster | None = None
        self.transport, self.lifeline = make_transport(servers, options)
        self._race = Race(drivers, submit, self.transport)
        try:
            self._join(servers, options)
        except BaseException as error:
            self.close()
            refuse_if_nccl_says_so(error, self.transport.device)
            raise

    def _join(self, servers: Sequence[ServerInfo], options: Options) -> None:
        rendezvous = dict(self.transport.rendezvous())
        if self.lifeline is not None:
            # The trainer is the first to give up: it knows who is missing, and workers leave then.
            seconds = self._clock.connect + 2 * ANSWER_SECONDS
            rendezvous |= self.lifeline.rendezvous() | {"join_seconds": seconds}
        calls: list[Callable[[], None]] = []
        offset = 1
        ranks: list[range] = []
        for driver, server in zip(self._drivers, servers, strict=True):
            info = JoinInfo(
                rendezvous,
                offset,
                self.world_size,
                options.packed,
                options.buffer_size,
                options.num_buffers,
            )
            calls.append(partial(driver.join, info))
            mine = range(offset, offset + server.world_size)
            ranks.append(mine)
            self._members += [Member(server.url, rank - offset, rank) for rank in mine]
            offset += server.world_size
        patience = self._clock.connect
        with self._race.beside("the join", calls, patience), options.trace.span("rendezvous"):
            self.transport.connect(patience)
        if self.lifeline is not None:
            for driver, mine in zip(self._drivers, ranks, strict=True):
                driver.settle([self.lifeline.reported(rank) for rank in mine])
        self.broadcaster = Broadcaster(
            self.transport,
            num_buffers=options.num_buffers,
            threads=options.threads,
            trace=options.trace,
        )

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """The block is a sync: workers of our own engine let no other trainer in meanwhile."""
        if self.lifeline is None:
            yield
            return
        self.lifeline.tell_syncing(True)
        try:
            yield
        finally:
            with contextlib.suppress(TransportError, RuntimeError):  # it may be closed by now
                self.lifeline.tell_syncing(False)

    def left(self) -> set[str]:
        """The servers of which a worker has said that it has left, to join another trainer, say."""
        if self.lifeline is None:
            return set()
        of = {url: list(members) for url, members in groupby(self._members, attrgetter("url"))}
        return {
            url
            for url, members in of.items()
            if self.lifeline.left([member.rank for member in members])
        }

    def call_roll(self) -> None:
        """Have every worker answer, beside what the caller does until `is_whole`."""
        if self.lifeline is not None:
            self.lifeline.call_roll([member.rank for member in self._members])

    def is_whole(self, check: Callable[[], None]) -> bool:
        """Whether every worker has answered the roll call: it was not restarted, nor has it left.

        Only workers of our own engine are asked; those of others count as there. A worker that does
        not answer is waited for; ``check`` may raise meanwhile.
        """
        if self.lifeline is None:
            return True
        ranks = [member.rank for member in self._members]
        patience = min(SILENCE_SECONDS, self._clock.progress)
        return not self.lifeline.absent(ranks, patience, check)

    def sync(
        self,
        plan: Plan,
        payloads: Iterator[Payload],
        begin: Callable[[], object],
        on_progress: Callable[[int], None],
        check: Callable[[], None],
        *,
        source: WeightSource,
    ) -> None:
        """Run ``begin()``, then every call of ``plan``, while this thread reads ``payloads``.

        ``begin()`` may be given up: see `while_beginning`. `flowing` tells afterwards whether any
        worker may have received something, and `sent` what was sent if that is to be verified;
        `verify_seconds` is what that has cost, on the rank where it took longest. If the source was
        what failed, the group is whole; if its transport was aborted, it is dead.
        """
        assert self.broadcaster is not None
        self.flowing, self.sent, self.verify_seconds = False, None, 0.0
        digests: list[str] = []

        def conduct(stream: ChunkStream) -> None:
            self._beginning = True
            try:
                begin()
            finally:
                with self._turn:
                    self._beginning = False
            for number, call in enumerate(plan.calls, start=1):
                if stream.look() is not None:
                    return
                self.flowing = True
                if self._verify:
                    what = f"call {number} of {len(plan.calls)}"
                    digests.append(self._send_verified(stream, call, what))
                else:
                    self._send(stream, call)
            if self._verify:
                self.sent = Sent(plan.calls, tuple(digests))

        self.broadcaster.sync(
            plan,
            payloads,
            conduct,
            source=source,
            progress_timeout=self._clock.progress,
            on_progress=on_progress,
            check=check,
        )

    def _send(self, stream: ChunkStream, call: Call, verify: int | None = None) -> None:
        updates = [partial(driver.update, call, verify) for driver in self._drivers]
        patience = self._clock.progress
        with self._race.beside("the update", updates, patience, untaken=_UNTAKEN_SECONDS):
            stream.send(call)
            # Also on the device: what follows must not find a kernel that waits for a worker.
            self.transport.wait(patience)

    def _send_verified(self, stream: ChunkStream, call: Call, what: str) -> str:
        """Send ``call`` and return its digest, once every worker that tells one got the same.

        Filler is not compared: it may change while it is sent, and the sync has failed.
        """
        digest = self.transport.digest = StreamDigest(self.transport.device)
        self._verified += 1
        try:
            self._send(stream, call, self._verified if self.lifeline is not None else None)
        finally:
            self.transport.digest = None
        sent, seconds = digest.hexdigest(), digest.seconds
        if self.lifeline is not None and stream.failure is None:
            reported = self.lifeline.reported
            slowest = compare(what, sent, self._verified, self._members, reported)
            seconds = max(seconds, slowest)
        self.verify_seconds += seconds
        return sent

    def while_beginning(self, step: Callable[[], None]) -> None:
        """From any thread, but no handler of signals: run ``step`` if ``begin()`` of a sync does.

        What follows on ``begin()`` waits for it: no call of an update is hit by what is for it.
        """
        with self._turn:
            if self._beginning:
                step()

    def stop(self, error: BaseException) -> None:
        """From any thread: end the sync under way as if its source had failed with ``error``."""
        if self.broadcaster is not None:
            self.broadcaster.stop(error)

    def close(self) -> None:
        """Leave the group and free its memory; the workers of our own engine notice at once."""
        with contextlib.ExitStack() as stack:  # what is left is closed also after a Ctrl-C
            if self.lifeline is not None:
                stack.callback(self.lifeline.close)
            if self.broadcaster is not None:
                stack.callback(self.broadcaster.close)
            stack.callback(self.transport.close)
