"""One server over real HTTP: one call, one answer or one error, no secret in any of them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import traceback

import pytest

from streamer import (
    DeadlineExceeded,
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
    UsageError,
)
from streamer.drivers.http import HttpClient, normalize_url
from streamer.drivers.secrets import hide_user
from streamer.drivers.vllm_info import SERVER_INFO

pytestmark = pytest.mark.timeout(60)

SECRET = "s3cr3t-t0ken"


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


def shown(error: BaseException) -> str:
    """All that a user may get to see of an error: itself, its causes, its traceback."""
    return "".join(traceback.format_exception(error)) + repr(error)


# URLs.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000///", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("http://host/prefix/v1", "http://host/prefix"),
        ("https://host/a/b/", "https://host/a/b"),
        ("http://host/v1beta", "http://host/v1beta"),
        ("host:8000", "http://host:8000"),
        ("host", "http://host"),
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://user:pw@host:1/v1", "http://user:pw@host:1"),
        ("HTTP://host", "http://host"),
    ],
)
def test_urls_are_normalised(url, expected):
    """Case 38."""
    assert normalize_url(url) == expected
    assert normalize_url(expected) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://host",
        "file:///etc/passwd",
        "http://host:0",
        "http://host:port",
        "http://host:99999",
        "http://host?x=1",
        "http://host/#here",
        "http://[::1",
        "http://[nonsense]:80",
        "://host",
    ],
)
def test_what_is_no_server_url_is_refused(url):
    with pytest.raises(UsageError, match="not a server URL"):
        normalize_url(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:1/p", "http://host:1/p"),
        ("http://user:pw@host:1/p", "http://…@host:1/p"),
        ("http://user:p@w@host", "http://…@host"),
        ("user:pw@host:1", "host:1"),
        ("host:1", "host:1"),
        ("http://host:1/models/me@org", "http://host:1/models/me@org"),
        ("http://user:p@w@host/me@org", "http://…@host/me@org"),
        ("http://user:p/w@host", "http://…@host"),
    ],
)
def test_user_and_password_are_hidden(url, expected):
    assert hide_user(url) == expected


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@host:port", f"ftp://u:{SECRET}@host",
                                 f"u:{SECRET}@host:0", f"http://u:{SECRET}@[::1"])  # fmt: skip
def test_a_refused_url_does_not_show_its_password(url):
    with pytest.raises(UsageError) as caught:
        normalize_url(url)
    assert SECRET not in shown(caught.value)


def test_host_and_port():
    for url, host, port in [
        ("http://host:8000/p", "host", 8000),
        ("https://host", "host", 443),
        ("http://u:p@host", "host", 80),
        ("http://[::1]:5", "::1", 5),
    ]:
        one = HttpClient(url, connect_timeout=1)
        assert (one.host, one.port) == (host, port)


# Answers.


def test_get_and_post(client, fake_server, reply):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    fake_server.routes["POST /do"] = reply({"done": True})
    fake_server.routes["POST /quiet"] = reply("")
    one = client()
    assert one.get("/version", 5) == {"version": "1"}
    assert one.post("/do?mode=keep", {"a": [1, None]}, 5) == {"done": True}
    assert one.post("/quiet", None, None) == {}
    assert fake_server.paths == ["GET /version", "POST /do?mode=keep", "POST /quiet"]
    assert [call.body for call in fake_server.calls] == [None, {"a": [1, None]}, None]


def test_a_path_prefix_is_kept(client, fake_server, reply):
    fake_server.routes["GET /proxy/one/version"] = reply({"version": "1"})
    one = client(fake_server.url + "/proxy/one/v1/")
    assert one.get("/version", 5) == {"version": "1"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"error": {"message": "no backend\nhere", "code": 500}}, "no backend here"),
        ({"message": "flat"}, "flat"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"odd": 1}, "{'odd': 1}"),
        (["a", "list"], "['a', 'list']"),
        ("plain  words", "plain words"),
        ("<!doctype html><HTML><body>Bad Gateway", "(an HTML page)"),
        ("", ""),
        ("x" * 2000, "x" * 500 + " …"),
    ],
)
@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_refusal_carries_status_and_text(client, fake_server, reply, status, content, text):
    fake_server.routes["POST /do"] = reply(content, status)
    with pytest.raises(ServerRefused) as caught:
        client().post("/do?x=1", {}, 5)
    assert str(caught.value) == f"POST {fake_server.url}/do: {status} {text}"
    assert caught.value.status == status
    assert len(fake_server.calls) == 1


@pytest.mark.parametrize(
    "content", ["<html>welcome</html>", "{broken", "[1, 2]", "5", '"text"', "null", b"\xff\xfe\x00"]
)
def test_an_answer_that_is_no_json_object(client, fake_server, reply, content):
    """Case 35: some other web server answers 200."""
    fake_server.routes["GET /version"] = reply(content, headers={"Content-Type": "text/html"})
    with pytest.raises(IncompatibleServer) as caught:
        client().get("/version", 5)
    assert str(caught.value) == (
        f"GET {fake_server.url}/version: answered 200 with text/html, not a JSON object; does this "
        "URL lead to an inference server?"
    )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_redirects_are_refused_and_not_followed(
    client, start_fake, fake_server, reply, status, method
):
    """Case 38. Following one would send the caller's headers to another host."""
    elsewhere = start_fake()
    elsewhere.routes["GET /x"] = elsewhere.routes["POST /x"] = reply({"fine": True})
    target = f"http://user:{SECRET}@{elsewhere.host}/x"
    fake_server.routes[f"{method} /x"] = reply({}, status, {"Location": target})
    one = client(headers={"X-Api-Key": SECRET})
    with pytest.raises(IncompatibleServer) as caught:
        one.get("/x", 5) if method == "GET" else one.post("/x", {}, 5)
    assert f"redirected to http://…@{elsewhere.host}/x" in str(caught.value)
    assert SECRET not in shown(caught.value)
    assert elsewhere.calls == []


@pytest.mark.parametrize("status", [300, 302, 304])
def test_an_empty_answer_that_is_no_success_is_no_success(client, fake_server, reply, status):
    fake_server.routes["POST /do"] = reply("", status)
    with pytest.raises(StreamerError):
        client().post("/do", {}, 5)


@pytest.mark.parametrize("raw", ["-5\r\n{}\r\n0\r\n\r\n", "2\r\n{}\r\n-3\r\n\r\n", "-1\r\n{}"])
def test_a_chunk_of_a_size_below_zero_is_no_answer(client, fake_server, raw):
    def send(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw.encode())
        handler.close_connection = True

    fake_server.routes["GET /x"] = send
    with pytest.raises(ServerUnreachable, match=r"/x: the answer (is not HTTP|broke off); is the"):
        client().get("/x", 5)


def test_a_text_that_is_none_is_not_sent(client, fake_server, reply):
    """A lone surrogate, as from an argument that is not UTF-8: servers fail on it from then on."""
    fake_server.routes["POST /do"] = reply({})
    with pytest.raises(UsageError, match=r"POST .*/do: a text in it has half a character"):
        client().post("/do", {"a": ["v\udcff"]}, 5)
    assert fake_server.calls == []
    client().post("/do", {"a": "whole: \U0001f600"}, 5)
    assert fake_server.calls[0].body == {"a": "whole: \U0001f600"}


# Failing.


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


# Several questions at once.


def test_questions_do_not_wait_for_each_other(client, fake_server, reply):
    both = threading.Barrier(2, timeout=5)

    def meet(content):
        def answer(handler):
            both.wait()
            reply(content)(handler)

        return answer

    fake_server.routes["GET /one"], fake_server.routes["GET /two"] = meet({"a": 1}), meet({"b": 2})
    assert client().get_all(["/one", "/two"], 5) == [{"a": 1}, {"b": 2}]


def test_of_several_questions_the_one_that_is_refused_is_named(client, fake_server, reply):
    fake_server.routes["GET /one"] = reply({})
    fake_server.routes["GET /two"] = reply({"detail": "no"}, 500)
    one = client()
    with pytest.raises(ServerRefused, match="/two: 500 no") as caught:
        one.get_all(["/one", "/two"], 5)
    assert (caught.value.status, caught.value.path) == (500, "/two")
    assert not one._calls


def test_several_questions_can_be_cancelled(client, fake_server, reply, eventually):
    fake_server.routes["GET /one"] = fake_server.routes["GET /two"] = reply({}, delay=30)
    one = client()
    thread, errors = in_thread(lambda: one.get_all(["/one", "/two"], 60))
    eventually(lambda: len(fake_server.calls) == 2)
    one.cancel()
    thread.join(5)
    assert [type(error) for error in errors] == [ServerUnreachable]
    assert "/one: cancelled" in str(errors[0])
    assert not one._calls


# What is not answered as it should be.


def test_an_answer_that_comes_before_the_body_was_read(client, raw_server):
    url = raw_server(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", read=False)
    with pytest.raises(ServerRefused) as caught:
        client(url).post("/update_weights", {"names": ["x" * 1000] * 20_000}, 10)
    assert caught.value.status == 401


def test_early_hints_are_no_answer(client, raw_server):
    url = raw_server(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
    with pytest.raises(IncompatibleServer, match="answered 103"):
        client(url).post("/update_weights", {}, 10)


@pytest.mark.parametrize("timeout", [10, None])
def test_the_connect_timeout_is_not_for_sending(client, raw_server, timeout):
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    url = raw_server(answer, late=1.0)
    one = client(url, connect_timeout=0.3)
    assert one.post("/update_weights", {"names": ["x" * 1000] * 20_000}, timeout) == {}


@pytest.mark.parametrize("url", ["http://a b:80", "http://a b"])
def test_a_host_with_a_blank_is_no_url(url):
    with pytest.raises(UsageError, match="not a server URL"):
        HttpClient(url, connect_timeout=5)


def test_a_refused_proxy_leaves_no_call(client, monkeypatch):
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    one = client("http://server.invalid", trust_env=True)
    with pytest.raises(UsageError, match="not an http://"):
        one.get("/version", 5)
    assert not one._calls


def test_half_an_answer_is_an_error(client, fake_server, reply):
    fake_server.routes["GET /x"] = lambda handler: (
        reply({"a": 1}, headers={"Content-Length": "5000"})(handler),
        setattr(handler, "close_connection", True),
    )
    with pytest.raises(ServerUnreachable):
        client().get("/x", 5)


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
    with pytest.raises(DeadlineExceeded, match=r"GET .*/stall: no answer after 0\.\d s"):
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


# Cancelling.


def in_thread(call):
    errors: list[BaseException] = []

    def run():
        try:
            call()
        except StreamerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_cancel_wakes_a_blocked_call(client, fake_server, reply, eventually):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    fake_server.routes["POST /update_weights"] = reply({}, delay=30)
    one = client()
    thread, errors = in_thread(lambda: one.post("/update_weights", {}, None))
    eventually(lambda: "/update_weights" in fake_server.posts)
    started = time.monotonic()
    one.cancel()
    thread.join(10)
    assert time.monotonic() - started < 1
    assert str(errors[0]) == f"POST {fake_server.url}/update_weights: cancelled"
    assert isinstance(errors[0], ServerUnreachable)
    assert one.get("/version", 5) == {"version": "1"}, "later calls work"


def test_cancel_wakes_every_blocked_call(client, fake_server, reply, eventually):
    fake_server.routes["POST /a"] = fake_server.routes["POST /b"] = reply({}, delay=30)
    one = client()
    calls = [in_thread(lambda path=path: one.post(path, {}, None)) for path in ("/a", "/b")]
    eventually(lambda: len(fake_server.calls) == 2)
    started = time.monotonic()
    one.cancel()
    for thread, errors in calls:
        thread.join(10)
        assert "cancelled" in str(errors[0])
    assert time.monotonic() - started < 1


def test_cancel_without_a_call_is_harmless(client, fake_server, reply):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    one = client()
    one.cancel()
    assert one.get("/version", 5) == {"version": "1"}
    one.cancel()
    assert one.get("/version", 5) == {"version": "1"}


# The environment.

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


def test_proxies_of_the_environment_are_ignored(client, fake_server, reply, proxied):
    """Case 37."""
    fake_server.routes["GET /version"] = reply({"version": "1"})
    proxied()
    assert client().get("/version", 5) == {"version": "1"}


def test_proxies_apply_when_they_are_told_to(client, fake_server, reply, proxied):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    proxied()
    with pytest.raises(ServerUnreachable):
        client(trust_env=True).get("/version", 5)
    assert fake_server.calls == []


def test_a_call_through_a_proxy_can_be_cancelled(client, start_fake, reply, proxied, eventually):
    proxy = start_fake()
    proxy.routes["POST http://server.invalid/update_weights"] = reply({}, delay=30)
    proxied(proxy.url)
    one = client("http://server.invalid", trust_env=True)
    thread, errors = in_thread(lambda: one.post("/update_weights", {}, None))
    eventually(lambda: proxy.calls)
    started = time.monotonic()
    one.cancel()
    thread.join(5)
    late = thread.is_alive()
    proxy._server.stopping.set()
    thread.join(10)
    assert not late, "not woken within 5 s"
    assert time.monotonic() - started < 1
    assert "cancelled" in str(errors[0])


def test_netrc_is_not_read(client, fake_server, reply, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    fake_server.routes["GET /version"] = reply({"version": "1"})
    client(headers={"Authorization": "Bearer mine"}).get("/version", 5)
    assert fake_server.calls[0].headers["Authorization"] == "Bearer mine"


# Secrets: case 38.


def test_headers_go_with_every_call(client, fake_server, reply):
    fake_server.routes["GET /version"] = fake_server.routes["POST /do"] = reply({"a": 1})
    one = client(headers={"Authorization": f"Bearer {SECRET}", "X-Team": "rl"})
    one.get("/version", 5)
    one.post("/do", {}, 5)
    for call in fake_server.calls:
        assert call.headers["Authorization"] == f"Bearer {SECRET}"
        assert call.headers["X-Team"] == "rl"


def test_user_and_password_of_the_url_are_sent(client, fake_server, reply):
    fake_server.routes["GET /version"] = reply({"a": 1})
    one = client(f"http://user:{SECRET}@{fake_server.host}")
    one.get("/version", 5)
    assert fake_server.calls[0].headers["Authorization"].startswith("Basic ")
    assert one.url == f"http://…@{fake_server.host}"


def failures(fake_server, reply, free_port):
    """Routes that fail, each in its own way, and URLs of them."""
    fake_server.routes["GET /500"] = reply({"error": "broken"}, 500)
    fake_server.routes["GET /401"] = reply("who are you?", 401)
    fake_server.routes["GET /html"] = reply("<html>")
    fake_server.routes["GET /moved"] = reply({}, 307, {"Location": "https://elsewhere/"})
    fake_server.routes["GET /slow"] = reply({}, delay=5)
    fake_server.routes["GET /cut"] = lambda handler: (
        setattr(handler, "close_connection", True),
        handler.connection.shutdown(socket.SHUT_RDWR),
    )
    for path in ("/500", "/401", "/html", "/moved", "/slow", "/cut"):
        yield f"{fake_server.host}", path
    yield f"127.0.0.1:{free_port()}", "/dead"
    yield "no-such-host.invalid", "/lost"


def test_no_secret_is_in_any_error_repr_or_log(client, fake_server, reply, free_port, caplog):
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": f"Bearer {SECRET}", "X-Key": SECRET}
    seen = 0
    for host, path in failures(fake_server, reply, free_port):
        one = client(f"http://user:{SECRET}@{host}/", headers=headers)
        assert SECRET not in repr(one) + str(one)
        with pytest.raises(StreamerError) as caught:
            one.get(path, 0.5)
        assert SECRET not in shown(caught.value), path
        assert host in str(caught.value)
        seen += 1
    assert seen == 8
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [200, 401])
def test_a_server_that_echoes_the_headers_gives_no_secret_away(client, fake_server, status, reply):
    """Debugging proxies do; the text of a refusal goes into the error."""

    def echo(handler):
        text = f"bad credentials: {dict(handler.headers.items())}"
        reply(text, status)(handler)

    fake_server.routes["GET /echo"] = echo
    one = client(headers={"Authorization": f"Bearer {SECRET}"})
    with pytest.raises(StreamerError) as caught:
        one.get("/echo", 5)
    assert SECRET not in shown(caught.value)


def test_an_answer_that_repeats_a_secret_is_given_without_it(client, fake_server, reply):
    """Its fields go into reports and errors. A weight version is compared and written back."""
    value = {"version": f"0.33 {SECRET}", "a": [{"b": [SECRET, 1, None, True]}], "n": 5}
    fake_server.routes["GET /x"] = reply({**value, "weight_version": f"v-{SECRET}"})
    one = client(headers={"X-Key": SECRET})
    assert one.get("/x", 5) == {
        "version": "0.33 …",
        "a": [{"b": ["…", 1, None, True]}],
        "n": 5,
        "weight_version": f"v-{SECRET}",
    }
    assert one.hide(f"v-{SECRET}") == "v-…"


ESCAPED = ["s3cr\\3t", 's3cr"3t', "s3cr'3t", "s3'cr\"3t", "\\s'3\"c\\r3t\\"]


def told_by(secret):
    """What a server may say that has been told ``secret``, and what is shown of it."""
    spellings = [
        secret,
        json.dumps(secret),
        repr(secret),
        repr([secret, "'\""]),
        repr([{secret: 1}]),
    ]
    for text in spellings:
        yield {"detail": [{"input": f"Bearer {text}"}]}
        yield {"detail": {text: "is none"}}
        yield {"error": {"message": text}}
        yield {"odd": [text, {text: [text]}]}
        yield text
        yield json.dumps({"detail": text}) + "and more"
        yield json.dumps({"a": [text]})[:-1]
        yield json.dumps([text])[:-1] + ', "' + "[" * 2000


@pytest.mark.parametrize("secret", ESCAPED)
def test_no_refusal_shows_a_secret_in_an_escaped_form(client, fake_server, reply, secret):
    one = client(headers={"Authorization": f"Bearer {secret}"})
    forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], repr(secret + "'\"")[1:-4]}
    for content in told_by(secret):
        fake_server.routes["GET /x"] = reply(content, 422)
        with pytest.raises(ServerRefused, match="422 ") as caught:
            one.get("/x", 5)
        assert "…" in str(caught.value)
        assert not [form for form in forms if form in str(caught.value)], content
        assert "3t" not in str(caught.value).replace("…", ""), content


@pytest.mark.parametrize("secret", [SECRET, *ESCAPED])
def test_the_names_in_an_answer_are_without_secrets(client, fake_server, reply, secret):
    fake_server.routes["GET /x"] = reply({secret: 1, "a": [{f"{secret}-b": {secret: secret}}]})
    one = client(headers={"X-Key": secret})
    assert one.get("/x", 5) == {"…": 1, "a": [{"…-b": {"…": "…"}}]}


def test_what_an_answer_has_to_say_is_no_secret(client, fake_server, reply):
    """Whatever is in a header: the engine of this server, say, or its version."""
    value = {"backend": "streamer", "device": "cuda:0", "version": "0.33.0"}
    fake_server.routes["GET /x"] = reply(value)
    headers = {"X-Backend": "streamer", "X-Engine": "nccl cuda", "X-Vllm-Version": "0.33.0"}
    assert client(f"http://stream:er@{fake_server.host}", headers=headers).get("/x", 5) == value


def test_no_name_that_is_looked_for_is_a_secret(client, fake_server, reply):
    """A user called "backend", say."""
    config = {"weight_transfer_config": {"backend": "nccl"}, "device_config": {"device": "cpu"}}
    config["instance_id"] = "i"
    system = {
        "env_vars": "NCCL_X=1",
        "torch_version": "2.0",
        "pip_packages": "nvidia-nccl-cu12=2.1",
    }
    answers = {
        "/version": {"version": "0.33.0"},
        "/get_world_size": {"world_size": 2},
        SERVER_INFO: {"vllm_config": config, "system_env": system},
        "/weight_info": {"weight_version": "v"},
        "/is_paused": {"is_paused": False},
        "/weight_checker": {"checksums": {}},
    }
    for path, content in answers.items():
        fake_server.routes[f"GET {path.partition('?')[0]}"] = reply(content)
    for name in names_in(answers):
        one = client(headers={"X-Key": name})
        assert [one.get(path, 5) for path in answers] == list(answers.values())


def names_in(value):
    """All names of the objects in ``value`` that are no routes."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not name.startswith("/"):
                yield name
            yield from names_in(item)


def test_a_deep_answer_is_no_json_object(client, fake_server, reply):
    for depth in (400, 900, 100_000):
        fake_server.routes["GET /x"] = reply('{"a":' + "[" * depth + "]" * depth + "}")
        with contextlib.suppress(IncompatibleServer):
            client(headers={"X-Key": SECRET}).get("/x", 5)


@pytest.mark.parametrize(
    "raw",
    [
        f"{SECRET}\r\n\r\n",
        f"HTTP/9.9 200 {SECRET}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{SECRET}",
    ],
)
def test_what_is_no_http_is_shown_without_secrets(client, fake_server, raw):
    """The errors of http.client quote it."""

    def send(handler):
        handler.wfile.write(raw.encode())
        handler.close_connection = True

    fake_server.routes["GET /x"] = send
    with pytest.raises(ServerUnreachable) as caught:
        client(headers={"X-Key": SECRET}).get("/x", 5)
    assert SECRET not in shown(caught.value)


def test_a_proxy_that_repeats_its_password_gives_no_secret_away(client, proxied):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 407 not with {SECRET}\r\n\r\n".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        proxied(f"http://me:{SECRET}@127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerUnreachable, match="407 not with …") as caught:
            client("https://server.invalid", trust_env=True).get("/x", 5)
        thread.join()
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("value", [f"Bearer {SECRET}\n", f" {SECRET}", f"Bearer {SECRET}\r\nX: y",
                                   f"Bearer {SECRET} ☃"])  # fmt: skip
def test_a_header_that_cannot_be_sent_is_named_without_its_value(value):
    """A token that was read from a file with its newline."""
    with pytest.raises(UsageError) as caught:
        HttpClient("http://127.0.0.1:9", connect_timeout=1, headers={"Authorization": value}).get(
            "/version", 1
        )
    assert "Authorization" in str(caught.value)
    assert SECRET not in shown(caught.value)


# TLS.


def test_a_certificate_that_is_not_trusted_is_an_error(client, fake_server):
    """The fake server speaks no TLS at all: an error in words, and no retry."""
    with pytest.raises(ServerUnreachable) as caught:
        client(f"https://{fake_server.host}").get("/version", 5)
    assert f"GET https://{fake_server.host}/version: " in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_ca_bundle_that_is_not_there_is_an_error_of_ours(client):
    with pytest.raises(StreamerError) as caught:
        client("https://127.0.0.1:9", ca_bundle="/no/such/bundle.pem").get("/version", 1)
    assert "/no/such/bundle.pem" in str(caught.value)


# Leaks.


def test_no_call_leaves_a_connection(client, fake_server, reply, leaks):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    one = client()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        one.get("/version", 5)
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # the fake server's ends may linger
