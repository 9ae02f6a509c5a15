"""The broadcast group of a session: servers that have joined, the transport, the broadcaster."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.drivers.base import Driver, JoinInfo, ServerInfo
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerError,
    ServerUnreachable,
    StreamerError,
    TransportError,
)
from streamer.options import Options
from streamer.plan import Plan
from streamer.source import Payload
from streamer.timeouts import Clock
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline
from streamer.transport.nccl import NcclTransport

_ANSWER_SECONDS = 2.0
"""When the data plane breaks, how long a server is given to say why."""


class Group:
    """Rank 0 of a broadcast group over all workers of all servers."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        servers: Sequence[ServerInfo],
        options: Options,
        clock: Clock,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._drivers = drivers
        self._clock = clock
        self._pool = pool
        self.world_size = 1 + sum(server.world_size for server in servers)
        self.flowing = False
        self.lifeline: Lifeline | None = None
        self.transport = self._make_transport(servers, options)
        self.broadcaster: Broadcaster | None = None
        try:
            self._join(servers, options)
        except BaseException:
            self.close()
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
        if backends == {"streamer"}:
            address = options.address or _address_towards([server.url for server in servers])
            self.lifeline = Lifeline.host(address)
        if devices == {"cpu"}:
            if self.lifeline is None:
                raise IncompatibleServer(
                    f"{servers[0].url}: vLLM's own nccl engine cannot receive on a CPU; install "
                    "streamer beside vLLM and start it with --weight-transfer-config "
                    '\'{"backend": "streamer"}\''
                )
            return GlooTransport(self.lifeline, 0, self.world_size)
        device = options.device or torch.device("cuda", _current_device())
        return NcclTransport(device, 0, self.world_size)

    def _join(self, servers: Sequence[ServerInfo], options: Options) -> None:
        rendezvous = dict(self.transport.rendezvous())
        if self.lifeline is not None:
            rendezvous |= self.lifeline.rendezvous()
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
            ranks.append(range(offset, offset + server.world_size))
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
            progress_timeout=self._clock.timeouts.progress,
            trace=options.trace,
        )

    def sync(
        self,
        plan: Plan,
        payloads: Iterator[Payload],
        begin: Callable[[], object],
        on_progress: Callable[[int], None],
        check: Callable[[], None],
    ) -> None:
        """Run ``begin()``, then every call of ``plan``, while this thread reads ``payloads``.

        `flowing` tells afterwards whether any worker may have received something. If the source
        was what failed, the group is whole; if its transport was aborted, it is dead.
        """
        assert self.broadcaster is not None
        self.flowing = False

        def conduct(stream: ChunkStream) -> None:
            begin()
            for call in plan.calls:
                if stream.failure is not None:
                    return
                self.flowing = True
                updates = [partial(driver.update, call) for driver in self._drivers]
                with self._beside("the update", updates, self._clock.timeouts.progress):
                    stream.send(call)

        self.broadcaster.sync(plan, payloads, conduct, on_progress=on_progress, check=check)

    @contextlib.contextmanager
    def _beside(
        self, what: str, calls: Sequence[Callable[[], None]], patience: float
    ) -> Iterator[None]:
        """Run ``calls``, one a driver, beside the block: whichever side fails first ends the other.

        A call that fails aborts the transport, which ends the block; its error is the one raised.
        When the block fails, the calls get a moment to say why, and are then cancelled. After the
        block they have ``patience`` seconds to answer.
        """

        def ended(future: Future[None]) -> None:
            if not future.cancelled() and future.exception() is not None:
                self.transport.abort(f"a server failed: {future.exception()}")

        futures = [self._pool.submit(call) for call in calls]
        for future in futures:
            future.add_done_callback(ended)
        try:
            yield
            late = wait(futures, patience).not_done
            if late:
                urls = [
                    driver.url
                    for driver, future in zip(self._drivers, futures, strict=True)
                    if future in late
                ]
                raise DeadlineExceeded(
                    f"{', '.join(urls)} did not answer {what} within {patience:g} s, though the "
                    "broadcast group was through"
                )
        except BaseException as error:
            self.transport.abort("the trainer gave up")
            if isinstance(error, TransportError | DeadlineExceeded):
                wait(futures, _ANSWER_SECONDS)
            said = _first_error(futures)
            self._cancel(futures)
            if said is not None and isinstance(error, StreamerError):
                raise said from error
            raise
        said = _first_error(futures)
        if said is not None:
            raise said

    def _cancel(self, futures: Sequence[Future[None]]) -> None:
        """End every call under way, also one that is just about to open its connection."""
        for _ in range(50):
            for driver in self._drivers:
                driver.cancel()
            if not wait(futures, 0.1).not_done:
                return
        raise TransportError("a call to a server could not be cancelled within 5 s")

    def close(self) -> None:
        """Leave the group and free its memory; the workers of our own engine notice at once."""
        self.transport.close()
        if self.broadcaster is not None:
            self.broadcaster.close()
        if self.lifeline is not None:
            self.lifeline.close()


def _first_error(futures: Sequence[Future[None]]) -> BaseException | None:
    errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    refusals = [error for error in errors if isinstance(error, ServerError)]
    return next(iter(refusals), None) or next((error for error in errors if error), None)


def _current_device() -> int:
    if not torch.cuda.is_available():
        raise TransportError(
            "the servers' workers are on GPUs, and torch sees no CUDA device here: NCCL needs one "
            "on the trainer's side too"
        )
    return torch.cuda.current_device()


def _address_towards(urls: Sequence[str]) -> str:
    """The address of this host that the servers' hosts reach it at.

    Loopback only if every server is on this host.
    """
    addresses = [_local_address(url) for url in urls]
    remote = [item for item in addresses if not ipaddress.ip_address(item).is_loopback]
    return (remote or addresses)[0]


def _local_address(url: str) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=5) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ServerUnreachable(f"{url}: {error.strerror or error}; is the server up?") from error
