"""What a call takes at most, whatever the server or the name server does: bytes, work, time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from streamer import DeadlineExceeded, IncompatibleServer, ServerRefused, ServerUnreachable
from streamer.drivers.http import HttpClient

pytestmark = pytest.mark.timeout(60)

PIECE = b" " * (1 << 20)
HEADER = b"X: " + b"y" * 50_000 + b"\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


# Answers without an end.


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", PIECE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1" + b"0" * 30 + b"\r\n\r\n", PIECE),
        (CHUNKED, b"100000\r\n" + PIECE + b"\r\n"),
        (CHUNKED + b"1" + b"0" * 30 + b"\r\n", PIECE),
        (CHUNKED + b"-1\r\n", PIECE),
        (CHUNKED + b"0\r\n", HEADER * 20),
        (b"", (b"HTTP/1.1 100 Continue\r\n" + HEADER + b"\r\n") * 20),
    ],
    ids=["plain", "length", "chunks", "chunk", "chunk of -1", "trailers", "heads"],
)
def test_an_answer_without_an_end_is_given_up(fake_server, head, piece):
    sent = 0

    def send(handler):
        nonlocal sent
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(head)
            for _ in range(128):
                handler.wfile.write(piece)
                sent += len(piece)

    fake_server.routes["GET /x"] = send
    with pytest.raises(IncompatibleServer) as caught:
        HttpClient(fake_server.url, connect_timeout=5).get("/x", 30)
    assert str(caught.value) == f"GET {fake_server.url}/x: answered more than 64 MiB"
    assert sent < 80 << 20


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("item", ["[],", "{},", "1,", '"",'])
def test_an_answer_of_too_many_values_is_not_taken_apart(fake_server, reply, status, item):
    """It takes long after the deadline, and gigabytes."""
    content = '{"a": [' + item * (24 << 20 >> 2) + "0]}"
    fake_server.routes["GET /x"] = reply(content.encode(), status)
    with pytest.raises((IncompatibleServer, ServerRefused)) as caught:
        HttpClient(fake_server.url, connect_timeout=5, headers={"X-Key": "s3cr3t"}).get("/x", 30)
    text = "answered 200 with" if status == 200 else '500 {"a": ['
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_checksums_of_a_large_model_are_taken(fake_server, reply):
    """32 workers, 5000 parameters each."""
    sums = {
        f"{worker}:model.layers.{number}.mlp.experts.w13_weight_scale": f"{number:064x}"
        for worker in range(32)
        for number in range(5000)
    }
    fake_server.routes["POST /x"] = reply(json.dumps({"checksums": sums}).encode())
    one = HttpClient(fake_server.url, connect_timeout=5, headers={"X-Key": "s3cr3t"})
    assert one.post("/x", {}, 30) == {"checksums": sums}


# Names.


@pytest.fixture
def silent(monkeypatch):
    """No name server answers, until the test is over."""
    over = threading.Event()
    here = socket.getaddrinfo

    def ask(host, port, *args, flags=0, **kwargs):
        if not flags & socket.AI_NUMERICHOST:
            over.wait(30)
        return here(host, port, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    yield
    over.set()
    for thread in threading.enumerate():
        if thread.name == "streamer-resolver":
            thread.join(10)


@pytest.mark.parametrize(("connect", "timeout"), [(0.3, None), (0.3, 30), (30, 0.3)])
def test_a_name_is_waited_for_no_longer_than_for_a_connection(silent, connect, timeout):
    one = HttpClient("http://server.invalid", connect_timeout=connect)
    started = time.monotonic()
    with pytest.raises(ServerUnreachable) as caught:
        one.post("/x", {}, timeout)
    assert 0.2 < time.monotonic() - started < 5
    assert str(caught.value) == (
        "POST http://server.invalid/x: Temporary failure in name resolution; is the server up?"
    )


def test_who_waits_for_a_name_can_be_cancelled(silent, eventually):
    one = HttpClient("http://server.invalid", connect_timeout=30)
    errors = []

    def call():
        with pytest.raises(ServerUnreachable) as caught:
            one.post("/x", {}, None)
        errors.append(str(caught.value))

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: any(each.name == "streamer-resolver" for each in threading.enumerate()))
    started = time.monotonic()
    one.cancel()
    thread.join(10)
    assert time.monotonic() - started < 1
    assert errors == ["POST http://server.invalid/x: cancelled"]


def test_a_name_that_resolves(fake_server, reply, monkeypatch):
    """What the thread has found, or what it has failed with, is what the call gets."""
    fake_server.routes["GET /x"] = reply({"a": 1})
    here = socket.getaddrinfo

    def ask(host, port, *args, flags=0, **kwargs):
        known = host == "server.invalid" and not flags
        return here("127.0.0.1" if known else host, port, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    port = fake_server.url.rpartition(":")[2]
    assert HttpClient(f"http://server.invalid:{port}", connect_timeout=5).get("/x", 5) == {"a": 1}
    with pytest.raises(ServerUnreachable, match=r"/x: (?!Temporary|no answer).*; is the server up"):
        HttpClient(f"http://a..b:{port}", connect_timeout=5).get("/x", 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_where_no_name_server_is_asked_no_thread_is_started(monkeypatch, free_port, host):
    """It would take longer than the rest of the call."""
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    with pytest.raises((ServerUnreachable, DeadlineExceeded)):
        HttpClient(f"http://{host}:{free_port()}", connect_timeout=5).get("/x", 5)
    assert started == []
