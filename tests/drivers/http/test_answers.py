"""What a server answers, and what is none."""

from __future__ import annotations

import pytest

from kit_http import SECRET, shown
from streamer import (
    IncompatibleServer,
    ServerRefused,
    ServerUnreachable,
    StreamerError,
    UsageError,
)
from streamer.drivers.http import HttpClient

pytestmark = pytest.mark.timeout(60)


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
    ("headers", "remedy"),
    [
        ({}, "send its key, as --api-key, STREAMER_API_KEY or headers= do"),
        ({"authorization": "Bearer wrong"}, "it does not take the key, or Authorization, that it"),
    ],
)
def test_who_sends_no_key_is_told_other_than_who_sends_a_wrong_one(
    fake_server, reply, headers, remedy
):
    fake_server.routes["GET /version"] = reply({"error": "no key"}, 401)
    with pytest.raises(ServerRefused) as caught:
        HttpClient(fake_server.url, connect_timeout=5, headers=headers).get("/version", 5)
    assert f"/version: 401 no key; {remedy}" in str(caught.value)
    assert "wrong" not in str(caught.value)


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
