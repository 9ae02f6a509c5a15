"""TLS to a real server, whose certificate is signed by a CA of the tests' own.

Both are in tls/, made with ``openssl req -x509`` and ``openssl x509 -req`` for localhost and
127.0.0.1, for 100 years. Of the CA's key there is no copy.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from streamer import ServerUnreachable, UsageError
from streamer.drivers.http import HttpClient

pytestmark = pytest.mark.timeout(60)

TLS = Path(__file__).parent / "tls"
SECRET = "s3cr3t-t0ken"


@pytest.fixture
def https(fake_server, reply):
    """The URL of the fake server, over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem")
    fake_server.secure(context)
    fake_server.routes["GET /version"] = reply({"version": "1"})
    fake_server.routes["POST /pause"] = reply({"status": "paused"})
    return fake_server.host.replace("127.0.0.1", "https://localhost")


def client(url, bundle=TLS / "ca.pem"):
    return HttpClient(
        url,
        connect_timeout=5,
        headers={"Authorization": SECRET},
        ca_bundle=None if bundle is None else str(bundle),
    )


def test_a_ca_of_one_s_own(fake_server, https):
    for url in (https, https.replace("localhost", "127.0.0.1")):
        assert client(url).get("/version", 5) == {"version": "1"}
        assert client(url).post("/pause", {}, 5) == {"status": "paused"}
    assert {call.headers["Authorization"] for call in fake_server.calls} == {SECRET}
    assert len(fake_server.calls) == 4


@pytest.mark.parametrize("why", ["unknown CA", "other name"])
def test_a_server_that_cannot_show_who_it_is_is_told_nothing(fake_server, https, monkeypatch, why):
    here = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: here("127.0.0.1", *a, **k))
    if why == "unknown CA":
        one = client(https, bundle=None)
    else:
        one = client(https.replace("localhost", "inference.example"))
    with pytest.raises(ServerUnreachable, match=r"(?i)certificate.verify.failed"):
        one.get("/version", 5)
    assert fake_server.calls == []


@pytest.mark.parametrize("what", ["a folder", "no PEM", "empty"])
def test_a_ca_bundle_that_is_none(tmp_path, what):
    path = tmp_path / "ca.pem"
    if what == "a folder":
        path.mkdir()
    else:
        path.write_text("" if what == "empty" else "-----BEGIN CERTIFICATE-----\nno\n")
    with pytest.raises(UsageError, match=r"ca\.pem .*give a PEM file"):
        client("https://127.0.0.1:9", path)


@pytest.mark.parametrize("proxy", ["socks5://h:1", "http://h:x", "http://", "https://h:1"])
def test_a_proxy_that_cannot_be_used(monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    one = HttpClient("http://inference.example", connect_timeout=5, trust_env=True)
    with pytest.raises(UsageError, match="the environment's proxy is not an http:// one"):
        one.get("/version", 5)


def test_a_server_without_tls_is_told_apart_from_one_that_is_down(fake_server, reply):
    fake_server.routes["GET /version"] = reply({"version": "1"})
    url = fake_server.host.replace("127.0.0.1", "https://127.0.0.1")
    with pytest.raises(ServerUnreachable) as caught:
        client(url).get("/version", 5)
    said = f"GET {url}/version: no TLS is spoken there; give the URL with http://"
    assert str(caught.value) == said
