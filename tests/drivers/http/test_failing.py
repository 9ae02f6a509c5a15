"""Calls that fail: nothing is repeated, and a deadline is kept."""

from __future__ import annotations

import errno
import os
import socket
import time

import pytest

from streamer import (
    DeadlineExceeded,
    ServerUnreachable,
)

pytestmark = pytest.mark.timeout(60)


def test_no_more_open_files_are_no_fault_of_the_server(client, monkeypatch):
    def none_left(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "getaddrinfo", none_left)
    with pytest.raises(ServerUnreachable, match=r"/x: Too many open files; raise .*ulimit -n\)$"):
        client().get("/x", 5)


def test_nobody_listens(client, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable) as caught:
        client(url).get("/version", 5)
    assert str(caught.value) == f"GET {url}/version: Connection refused; is the server up?"


def test_a_name_that_does_not_resolve(client):
    with pytest.raises(ServerUnreachable) as caught:
        client("http://no-such-host.invalid").get("/version", 5)
    assert "GET http://no-such-host.invalid/version: " in str(caught.value)
    assert "HTTPConnectionPool" not in str(caught.value)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_connection_that_breaks_is_not_tried_again(client, fake_server, method):
    """Case 6: the server may have done it already."""

    def hang_up(handler):
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    fake_server.routes[f"{method} /update_weights"] = hang_up
    one = client()
    with pytest.raises(ServerUnreachable, match=r"/update_weights: .*is the server up\?"):
        one.get("/update_weights", 5) if method == "GET" else one.post("/update_weights", {}, 5)
    time.sleep(0.2)
    assert fake_server.paths == [f"{method} /update_weights"]


def test_a_connection_that_was_idle_and_is_closed_is_not_used_for_a_post(
    client, fake_server, reply
):
    """A keep-alive connection that the server has dropped must not fail, or repeat, a POST."""

    def answer_and_drop(handler):
        reply({"n": 1})(handler)
        handler.close_connection = True

    fake_server.routes["POST /one"] = answer_and_drop
    fake_server.routes["POST /two"] = reply({"n": 2})
    one = client()
    assert one.post("/one", {}, 5) == {"n": 1}
    time.sleep(0.1)
    assert one.post("/two", {}, 5) == {"n": 2}
    assert fake_server.posts == ["/one", "/two"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_slow_server_ends_at_the_deadline(client, fake_server, reply, method):
    """Case 5: the error names the endpoint and the elapsed time."""
    fake_server.routes[f"{method} /slow"] = reply({}, delay=10)
    one = client()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        one.get("/slow", 0.5) if method == "GET" else one.post("/slow", {}, 0.5)
    assert 0.4 < time.monotonic() - started < 5
    assert str(caught.value).startswith(f"{method} {fake_server.url}/slow: no answer after 0.")
    assert len(fake_server.calls) == 1


def test_a_body_that_stalls_ends_at_the_deadline(client, fake_server):
    def stall(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"{")
        handler.server.stopping.wait(10)

    fake_server.routes["GET /stall"] = stall
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"GET .*/stall: no answer after 0\.\d+ s; look at the server's log"
    ):
        client().get("/stall", 0.5)
    assert time.monotonic() - started < 5


def test_an_answer_that_trickles_ends_at_the_deadline(client, fake_server):
    """A byte now and then is no answer: the deadline is that of the whole call."""

    def trickle(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            if handler.server.stopping.wait(0.1):
                return

    fake_server.routes["GET /trickle"] = trickle
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client().get("/trickle", 1)
    assert time.monotonic() - started < 5


def test_a_host_that_does_not_answer_ends_at_the_connect_timeout(client):
    """A listener whose backlog is full drops the handshake, as a firewall does."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        one = client(f"http://127.0.0.1:{full.getsockname()[1]}", connect_timeout=0.5)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            one.post("/x", {}, None)
        assert time.monotonic() - started < 5
