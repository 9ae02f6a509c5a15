"""Run the reference server: its socket, its life, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from streamer.exceptions import StreamerError
from streamer.receiver.key import RequireKey
from streamer.receiver.reference import ReferenceServer


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens there, and the URL it is reached at from this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Not socket.create_server: only where the protocol is named does asyncio set TCP_NODELAY,
        # and without that each answer takes 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StreamerError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    at, port = listener.getsockname()[:2]
    at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(at, at)
    return listener, f"http://[{at}]:{port}" if ":" in at else f"http://{at}:{port}"


def run(
    *,
    host: str,
    port: int,
    workers: int,
    device: str,
    discard: bool,
    api_key: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted, and leave no worker behind.

    ``port`` 0 takes a free one. With ``api_key``, every call but that of ``/health`` must carry it.
    ``on_ready(url)`` is called once every worker answers. Raises
    `StreamerError` if it cannot listen there, or a worker does not start.
    """
    listener, url = _listen(host, port)
    reference = ReferenceServer(workers, device, discard)
    failures: list[BaseException] = []

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            answers = asyncio.ensure_future(reference.call("checksum"))
            answers.add_done_callback(lambda task: task.cancelled() or task.exception())
            while not answers.done() and not self.should_exit:
                await asyncio.wait([answers], timeout=0.1)
            if not answers.done():
                return
            failure = answers.exception()
            if failure is not None:
                self.should_exit = True
                failures.append(failure)
            elif on_ready is not None:
                on_ready(url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # First the workers: then no request waits for one that is stuck.
            await asyncio.gather(*(worker.stop() for worker in reference.workers))
            await super().shutdown(sockets)

    app: ASGIApp = reference.app()
    if api_key is not None:
        app = RequireKey(app, api_key)
    # As vLLM is served, and not by what happens to be installed.
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", log_level="warning", timeout_graceful_shutdown=1
    )
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listener])
    if failures:
        raise StreamerError(f"the server did not start: {failures[0]}")
