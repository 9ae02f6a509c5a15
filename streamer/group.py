"""The broadcast group of a session: servers that have joined, the transport, the broadcaster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from streamer import descriptors
from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.callers import no_thread
from streamer.digest import StreamDigest
from streamer.drivers.base import Driver, JoinInfo, ServerInfo
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerError,
    ServerUnreachable,
    StreamerError,
    TransportError,
)
from streamer.gpus import refuse_if_nccl_says_so, refuse_own_gpu
from streamer.network import address_towards, check_address
from streamer.options import Options
from streamer.plan import Call, Plan
from streamer.source import Payload, WeightSource
from streamer.timeouts import Clock
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline
from streamer.transport.nccl import NcclTransport
from streamer.transport.store import SILENCE_SECONDS
from streamer.verify import Member, Sent, compare

_ANSWER_SECONDS = 2.0
"""When the data plane breaks, how long a server is given to say why."""
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
        submit: Callable[[Driver, Callable[[], None]], Future[None]],
    ) -> None:
        self._drivers = drivers
        self._clock = clock
        self._submit = submit
        self.world_size = 1 + sum(server.world_size for server in servers)
        self.flowing = False
        self._beginning = False
        self._turn = threading.Lock()  # held while that changes, or is acted upon
        self.sent: Sent | None = None
        self.verify_seconds = 0.0
        self._verify = options.verify
        self._verified = 0  # calls so far
        self._members: list[Member] = []
        self.lifeline: Lifeline | None = None
        self.broadcaster: Broadcaster | None = None
        try:
            self.transport = self._make_transport(servers, options)
        except BaseException:
            if self.lifeline is not None:
                self.lifeline.close()
            raise
        try:
            self._join(servers, options)
        except BaseException as error:
            self.close()
            refuse_if_nccl_says_so(error, self.transport.device)
            raise

    def _make_transport(self, servers: Sequence[ServerInfo], options: Options) -> Transport:
        backends = {server.backend for server in servers}
        devices = {server.device for server in servers}
        if len(backends) > 1 or len(devices) > 1:
            kinds = "; ".join(
                f"{server.url}: {server.backend} on {server.device}" for server in servers
            )
            raise IncompatibleServer(
                f"servers of one group must have one backend and one kind of device ({kinds}): "
                "push to them separately"
            )
        device = torch.device("cpu")
        if devices != {"cpu"}:
            device = options.device or torch.device("cuda", _current_device())
            refuse_own_gpu(servers, device)
        if backends == {"streamer"}:
            urls = [server.url for server in servers if server.towards is None]
            known = [server.towards for server in servers if server.towards is not None]
            workers = self.world_size - 1
            need = descriptors.of_group(workers, len(servers))
            descriptors.check_room(need, f"a group of {workers} workers")
            if options.address is not None:
                check_address(options.address, urls)
            address = options.address or address_towards(urls, known)
            self.lifeline = Lifeline.host(address, options.port)
        if device.type == "cpu":
            if self.lifeline is None:
                raise IncompatibleServer(
                    f"{servers[0].url}: vLLM's own nccl engine cannot receive on a CPU; install "
                    "streamer beside vLLM and start it with --weight-transfer-config "
                    '\'{"backend": "streamer"}\''
                )
            return GlooTransport(self.lifeline, 0, self.world_size)
        return NcclTransport(device, 0, self.world_size, lifeline=self.lifeline)

    def _join(self, servers: Sequence[ServerInfo], options: Options) -> None:
        rendezvous = dict(self.transport.rendezvous())
        if self.lifeline is not None:
            # The trainer is the first to give up: it knows who is missing, and workers leave then.
            patience = self._clock.connect + 2 * _ANSWER_SECONDS
            rendezvous |= self.lifeline.rendezvous() | {"join_seconds": patience}
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
        with self._beside("the join", calls, self._clock.connect), options.trace.span("rendezvous"):
            self.transport.connect(self._clock.connect)
        if self.lifeline is not None:
            for driver, mine in zip(self._drivers, ranks, strict=True):
                driver.settle([self.lifeline.reported(rank) for rank in mine])
        self.broadcaster = Broadcaster(
            self.transport,
            num_buffers=options.num_buffers,
            threads=options.threads,
            trace=options.trace,
        )

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

        ``begin()`` may be given up: see `while_beginning`. `flowing` tells
        afterwards whether any worker may have received something, and `sent` what
        was sent if that is to be verified; `verify_seconds` is what that has cost, on the rank
        where it took longest. If the source was what failed, the group is whole; if its transport
        was aborted, it is dead.
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
        with self._beside("the update", updates, patience, untaken=_UNTAKEN_SECONDS):
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

    @contextlib.contextmanager
    def _beside(
        self,
        what: str,
        calls: Sequence[Callable[[], None]],
        patience: float,
        untaken: float | None = None,
    ) -> Iterator[None]:
        """Run ``calls``, one a driver, beside the block: whichever side fails first ends the other.

        A call that fails aborts the transport, which ends the block; its error is the one raised.
        When the block fails, the calls get a moment to say why, and are then cancelled. After the
        block they have ``patience`` seconds to answer. Once all have answered, the block has
        ``untaken`` seconds if that is given: a server may answer without having done a thing.
        """
        through = threading.Event()
        futures: list[Future[None]] = []

        def silent() -> str:
            pairs = zip(self._drivers, futures, strict=False)
            return ", ".join(driver.url for driver, future in pairs if not future.done())

        def ended(future: Future[None]) -> None:
            if not future.cancelled() and future.exception() is not None:
                self.transport.abort(f"a server failed: {future.exception()}")

        def doubt() -> None:
            wait(futures)
            if not through.wait(untaken):
                self.transport.abort(
                    f"every server has answered {what}, but {untaken:g} s later their workers have "
                    "not taken all bytes: look for NCCL or Gloo errors in the servers' logs"
                )

        try:
            for driver, call in zip(self._drivers, calls, strict=True):
                futures.append(self._submit(driver, call))
                futures[-1].add_done_callback(ended)
            if untaken is not None:
                try:
                    threading.Thread(target=doubt, name="streamer-doubt", daemon=True).start()
                except RuntimeError as error:
                    raise no_thread(what, error) from error
            yield
            through.set()
            if wait(futures, patience).not_done:
                raise DeadlineExceeded(
                    f"the broadcast group was through, and nothing came for {patience:g} s"
                )
        except BaseException as error:
            through.set()
            self.transport.abort("the trainer gave up")
            if isinstance(error, TransportError | DeadlineExceeded):
                wait(futures, _ANSWER_SECONDS)
            said, urls = _first_error(futures), silent()
            told = error
            if said is not None and isinstance(error, StreamerError):
                told = said
            elif urls and type(error) in (TransportError, DeadlineExceeded):
                told = type(error)(f"{urls} did not answer {what}: {error}")
            if not self._cancel(futures):
                told.add_note("a call to a server could not be cancelled within 5 s")
            if told is error:
                raise
            raise told from error
        said = _first_error(futures)
        if said is not None:
            raise said

    def _cancel(self, futures: Sequence[Future[None]]) -> bool:
        """End every call under way, also one that is just about to open its connection.

        False if one has not ended within 5 s.
        """
        for _ in range(50):
            for driver in self._drivers:
                driver.cancel()
            if not wait(futures, 0.1).not_done:
                return True
        return False

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


def _first_error(futures: Sequence[Future[None]]) -> BaseException | None:
    errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    refusals = [error for error in errors if isinstance(error, ServerError)]
    # The others say that a worker has left; the one that is gone says nothing, and is the cause.
    refusals.sort(key=lambda error: not isinstance(error, ServerUnreachable))
    return next(iter(refusals), None) or next((error for error in errors if error), None)


def _current_device() -> int:
    if not torch.cuda.is_available():
        raise TransportError(
            "the servers' workers are on GPUs, and torch sees no CUDA device here: NCCL needs one "
            "on the trainer's side too"
        )
    return torch.cuda.current_device()
