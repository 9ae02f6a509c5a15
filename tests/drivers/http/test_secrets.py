"""No secret is in any error: case 38."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading

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
from streamer.drivers.vllm_info import SERVER_INFO

pytestmark = pytest.mark.timeout(60)


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
