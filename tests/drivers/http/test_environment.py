"""Proxies, netrc, certificates, and what a call leaves."""

from __future__ import annotations

import os
import time

import pytest

from kit_http import SECRET, in_thread
from streamer import (
    ServerUnreachable,
    StreamerError,
)

pytestmark = pytest.mark.timeout(60)


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
