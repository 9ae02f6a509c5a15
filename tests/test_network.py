"""Where workers are told to join: found out, or given, and checked before they are told."""

from __future__ import annotations

import socket

import pytest
import torch

import streamer
from streamer import Timeouts, TransportError, UsageError, network

pytestmark = pytest.mark.timeout(60)

TIMEOUTS = Timeouts(connect=20, progress=20)
WEIGHTS = {"w": torch.arange(7.0)}


def test_what_is_here_and_what_is_not():
    assert network.is_here("localhost")
    assert network.is_here("127.0.0.1")
    assert network.is_here("::1") == socket.has_dualstack_ipv6()
    assert not network.is_here("192.0.2.1")
    assert not network.is_here("no-such-host.invalid")
    assert not network.is_here("")


def test_what_is_on_one_host(monkeypatch):
    here = "http://127.0.0.1:1"
    assert network.on_one_host(here, "http://localhost:2")
    assert network.on_one_host("http://x.invalid:1", "http://x.invalid:2")
    assert not network.on_one_host(here, "http://192.0.2.1:1")
    monkeypatch.setattr(network, "is_here", lambda host: True)
    assert network.on_one_host(here, "http://192.0.2.1:1")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "no-such-host.invalid"])
def test_an_address_that_leads_nowhere_is_refused_before_anything(server, make_source, address):
    server.heal()
    with pytest.raises(UsageError, match=f"address {address}"):
        streamer.push(make_source(WEIGHTS), server.url, address=address, timeouts=TIMEOUTS)
    assert not [call for call in server.calls if call.startswith("POST")]


def test_loopback_is_for_servers_here(server, make_source, monkeypatch):
    streamer.push(make_source(WEIGHTS), server.url, address="localhost", timeouts=TIMEOUTS)
    monkeypatch.setattr(network, "is_here", lambda host: False)
    with pytest.raises(UsageError, match=f"leads workers of {server.url} to their own host"):
        streamer.push(make_source(WEIGHTS), server.url, address="127.0.0.1", timeouts=TIMEOUTS)


def test_a_port_that_is_taken_is_named_before_the_workers_are_asked(server, make_source):
    """Case 39."""
    server.heal()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"127.0.0.1:{port}: Address already in use; give"):
            streamer.push(make_source(WEIGHTS), server.url, port=port, timeouts=TIMEOUTS)
    assert not [call for call in server.calls if call.startswith("POST")]


def test_workers_join_at_the_port_that_is_given_again_and_again(
    server, make_source, free_port, monkeypatch
):
    """Connections of the last session linger on it, and a failed join left it: no reason not to."""
    port = free_port()
    for seed in range(3):
        weights = {"w": torch.full((5,), float(seed))}
        with streamer.connect(server.url, port=port, timeouts=TIMEOUTS) as session:
            session.push(make_source(weights))
            with socket.create_connection(("127.0.0.1", port)):
                pass
            session.join()
            session.push(make_source(weights), force=True)
        assert server.holds(weights)


@pytest.mark.parametrize("port", [-1, 1 << 16])
def test_a_port_that_is_none(port):
    with pytest.raises(UsageError, match=f"port must be a number from 0 to 65535, not {port}"):
        streamer.Session("http://127.0.0.1:1", port=port)
