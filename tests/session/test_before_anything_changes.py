"""What is found before anything is changed."""

from __future__ import annotations

import pytest
import torch

import streamer
from kit_session import weights
from streamer import (
    IncompatibleServer,
    PlanError,
    PluginError,
    ServerUnreachable,
    Session,
    SourceError,
    StreamerError,
    TransportError,
    UsageError,
    network,
)
from streamer.drivers import factory
from streamer.drivers.base import ServerInfo
from streamer.drivers.mark import INCOMPLETE

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("no/such/checkpoint", SourceError), ("nothing://x", PluginError), (5, SourceError)],
)
def test_a_source_that_cannot_be_opened(session, server, source, kind):
    one = session(server)
    server.heal()
    with pytest.raises(kind):
        one.push(source)
    assert server.calls == []


@pytest.mark.parametrize("what", ["empty", "twice", "broken specs"])
def test_specs_that_cannot_be_planned(session, server, make_source, what):
    one = session(server)
    server.heal()
    source = make_source({})
    if what == "twice":
        source = make_source([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    elif what == "broken specs":

        def specs():
            raise KeyError("index")

        source.specs = specs
    with pytest.raises(SourceError if what == "empty" else StreamerError):
        one.push(source)
    assert not [call for call in server.calls if call.startswith("POST")]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (5, "a weight version is a text, not 5"),
        ("", "the weight version is empty: give a name, or none, and one is made up"),
        (
            f"{INCOMPLETE}x",
            "a weight version must not start with 'streamer-incomplete:', which marks failures",
        ),
    ],
)
def test_what_is_no_weight_version(free_port, version, said):
    with pytest.raises(UsageError) as caught:
        streamer.push(weights(1), f"http://127.0.0.1:{free_port()}", weight_version=version)
    assert str(caught.value) == said


def test_one_server_twice():
    with pytest.raises(UsageError, match=r"^http://…@a:1 is given twice: give each server once$"):
        streamer.connect(["http://me:secret@a:1", "http://b:1", "me:secret@a:1/v1"])


def test_one_server_under_two_names(server):
    """It is found before the workers of the other one are waited for, which there is not."""
    server.heal()
    other = server.url.replace("127.0.0.1", "localhost")
    message = f"^{server.url} and {other} lead to one server: give each server once$"
    with pytest.raises(UsageError, match=message):
        streamer.connect([server.url, other])
    with pytest.raises(UsageError, match=message), Session([server.url, other]) as one:
        one.push(weights(1))
    assert not [call for call in server.calls if call.startswith("POST")]


def test_two_servers_of_one_name_are_two(monkeypatch):
    """vLLM's names are short: a large fleet may have one twice, on two hosts."""
    monkeypatch.setattr(factory, "on_one_host", lambda url, other: False)
    servers = [ServerInfo(url, "0.33", 1, "nccl", "cuda", instance="a") for url in ("x", "y")]
    factory.refuse_one_twice(servers)
    nameless = [ServerInfo(url, "0.33", 1, "nccl", "cuda") for url in ("x", "y")]
    monkeypatch.undo()
    factory.refuse_one_twice(nameless)


def test_options_are_checked_before_anything_is_asked(free_port):
    url = f"http://127.0.0.1:{free_port()}"
    for options in (
        {"pause": "stop"},
        {"num_buffers": 0},
        {"threads": 0},
        {"buffer_size": 0},
        {"backend": "mpi"},
        {"buffer_sise": 5},
    ):
        with pytest.raises(UsageError):
            Session(url, **options)
    for bad in ([], [url, url], [url, url + "/"], [url, url + "/v1"], ["ftp://host"]):
        with pytest.raises(UsageError):
            Session(bad)


def test_no_password_of_a_url_is_shown():
    for urls in (["http://u:sekrit@h:1"] * 2, ["http://u:sekrit@h:1", "http://u:sekrit@h:x"]):
        with pytest.raises(UsageError) as caught:
            Session(urls)
        assert "sekrit" not in str(caught.value)


def test_a_server_that_is_not_there(make_source, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        streamer.connect(url)
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        streamer.push(make_source(weights(1)), url)


@pytest.mark.parametrize(
    ("url", "port"), [("https://host", 443), ("http://host", 80), ("https://host:8443", 8443)]
)
def test_the_way_to_a_server_is_found_on_its_own_port(monkeypatch, url, port):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr(network.socket, "create_connection", connect)
    with pytest.raises(StreamerError, match="no route"):
        network.address_towards([url])
    assert asked == [("host", port)]


def test_servers_that_do_not_fit_together(server, fake_server, reply):
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                 "device_config": {"device": "cuda"}}}
            ),
        }
    )  # fmt: skip
    with pytest.raises(IncompatibleServer) as caught:
        streamer.connect([server.url, fake_server.url])
    assert f"{server.url}: streamer on cpu" in str(caught.value)
    assert f"{fake_server.url}: nccl on cuda" in str(caught.value)
    assert fake_server.posts == []


def test_gpus_over_there_and_none_here(fake_server, reply):
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                 "device_config": {"device": "cuda"}}}
            ),
        }
    )  # fmt: skip
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TransportError, match="torch sees no CUDA device here"):
        streamer.connect(fake_server.url)
    assert fake_server.posts == []


def test_a_push_that_vllm_s_engine_cannot_take_is_refused_before_any_post(
    fake_server, reply, make_source
):
    """Case 16."""
    fake_server.routes.update(
        {
            "GET /version": reply({"version": "0.33.0"}),
            "GET /get_world_size": reply({"world_size": 1}),
            "GET /weight_info": reply({"weight_version": "default"}),
            "GET /server_info": reply(
                {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}
            ),
        }
    )
    source = make_source({"mask": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(PlanError, match=r"tensor mask: .* cannot receive bool"):
        streamer.push(source, fake_server.url, packed=False)
    assert fake_server.posts == []
