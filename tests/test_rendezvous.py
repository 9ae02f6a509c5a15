"""What workers join: which transport, and that nothing is left of one that cannot be made."""

from __future__ import annotations

import pytest
import torch

from streamer import IncompatibleServer, TransportError, rendezvous
from streamer.drivers.base import ServerInfo
from streamer.options import Options
from streamer.rendezvous import make_transport, refuse_mixed, sending_device
from streamer.transport.gloo import GlooTransport

pytestmark = pytest.mark.timeout(60)


def info(number=1, *, world_size=2, backend="streamer", device="cpu"):
    url = f"http://127.0.0.1:800{number}"
    return ServerInfo(url, "0.33.0", world_size, backend, device, towards="127.0.0.1")


def test_workers_on_cpus_meet_in_a_lifeline(free_port):
    port = free_port()
    transport, lifeline = make_transport([info(1), info(2, world_size=3)], Options(port=port))
    try:
        assert isinstance(transport, GlooTransport)
        assert (transport.rank, transport.world_size) == (0, 6)
        assert lifeline.rendezvous() == {"master_address": "127.0.0.1", "master_port": port}
    finally:
        transport.close()
        lifeline.close()


@pytest.mark.parametrize("other", [{"backend": "nccl", "device": "cuda"}, {"device": "cuda"}])
def test_servers_of_two_kinds_are_no_group(other):
    servers = [info(1), info(2, **other)]
    for refuse in (refuse_mixed, lambda servers: make_transport(servers, Options())):
        with pytest.raises(IncompatibleServer) as caught:
            refuse(servers)
        assert str(caught.value) == (
            "servers of one group must have one backend and one kind of device "
            f"(http://127.0.0.1:8001: streamer on cpu; http://127.0.0.1:8002: "
            f"{servers[1].backend} on cuda): push to them separately"
        )


def test_servers_of_one_kind_are_a_group():
    refuse_mixed([info(1), info(2)])


def test_the_nccl_engine_of_vllm_is_not_for_cpus():
    with pytest.raises(IncompatibleServer, match="cannot receive on a CPU"):
        make_transport([info(backend="nccl")], Options())


def test_gpus_need_one_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportError, match="torch sees no CUDA device here"):
        make_transport([info(device="cuda")], Options())


def test_the_device_is_the_one_that_is_given_or_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert sending_device(Options()) == torch.device("cuda:3")
    assert sending_device(Options(device=torch.device("cuda:1"))) == torch.device("cuda:1")


def test_a_group_that_cannot_be_made_gives_its_port_back(monkeypatch, free_port):
    options = Options(port=free_port())

    def fail(*arguments):
        raise TransportError("made to fail")

    kept = []
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "GlooTransport", fail)
        with pytest.raises(TransportError, match="made to fail") as caught:
            make_transport([info()], options)
        kept.append(caught.value)
    transport, lifeline = make_transport([info()], options)
    transport.close()
    lifeline.close()
