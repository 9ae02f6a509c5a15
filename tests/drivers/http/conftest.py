"""Clients over real HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from streamer.drivers.http import HttpClient


@pytest.fixture
def client(fake_server):
    """A client of the fake server; options may be given."""

    def make(url=None, **options):
        return HttpClient(url or fake_server.url, **{"connect_timeout": 5, **options})

    return make


@pytest.fixture
def raw_server():
    """The URL of a server that takes one call, and answers these bytes, whatever it is asked."""
    with contextlib.ExitStack() as stack:

        def start(answer, *, read=True, late=0.0):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve():
                with contextlib.suppress(OSError), listener.accept()[0] as taken:
                    time.sleep(late)
                    if read:
                        taken.settimeout(0.5)
                        with contextlib.suppress(TimeoutError):
                            while taken.recv(1 << 20):
                                pass
                    taken.sendall(answer)
                    time.sleep(0 if read else 0.2)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join, 10)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


DEAD_PROXY = "http://127.0.0.1:9"


@pytest.fixture
def proxied(monkeypatch):
    """An environment that sends everything through ``url``."""

    def use(url=DEAD_PROXY):
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)

    return use
