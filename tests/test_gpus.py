"""Whether a worker is on the GPU that sends. No GPU here: what torch says of it is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from streamer import IncompatibleServer, TransportError, gpus
from streamer.drivers.base import ServerInfo

DEVICE = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Three GPUs, all seen here; somebody has 20 GB of each."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = {
        "device_count": lambda: 3,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"aaaa-{device.index}"),
        "mem_get_info": lambda device: (60 << 30, 80 << 30),
        "memory_reserved": lambda device: 0,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)


def server(*visible: str, url: str = "http://127.0.0.1:8000") -> ServerInfo:
    return ServerInfo(url, "0.33.0", len(visible), "nccl", "cuda", gpus=visible)


@pytest.mark.parametrize("name", ["1", "GPU-aaaa-1", "GPU-aaaa"])
def test_a_worker_on_the_gpu_that_sends_is_refused(name):
    servers = [server("0"), server("2", name)]
    with pytest.raises(IncompatibleServer, match="on the GPU that sends, cuda:1"):
        gpus.refuse_own_gpu(servers, DEVICE)


@pytest.mark.parametrize(
    "other",
    [
        server("0", "2"),
        server("11"),
        server("GPU-aaaa-2"),
        server(),
        server("1", url="http://203.0.113.7:8000"),
    ],
    ids=["others", "11 is not 1", "another UUID", "nothing known", "another host"],
)
def test_a_worker_elsewhere_is_not(other):
    gpus.refuse_own_gpu([other], DEVICE)


def test_what_a_number_means_depends_on_what_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    gpus.refuse_own_gpu([server("1")], DEVICE)
    with pytest.raises(IncompatibleServer, match="number 7 there"):
        gpus.refuse_own_gpu([server("7")], DEVICE)


def test_a_gpu_that_nobody_uses_holds_no_worker(monkeypatch):
    """The numbers of a container may mean other GPUs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    gpus.refuse_own_gpu([server("1")], DEVICE)


def test_nccl_decides_where_it_is_told_of_several_hosts(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "trainer")
    gpus.refuse_own_gpu([server("1")], DEVICE)


def test_what_nccl_says_is_found_in_the_chain():
    deep = TransportError("ncclCommInitRankConfig: Duplicate GPU detected : rank 0 and rank 1")
    error = RuntimeError("a server failed")
    error.__cause__ = deep
    with pytest.raises(IncompatibleServer, match="on the GPU that sends"):
        gpus.refuse_if_nccl_says_so(error, DEVICE)
    gpus.refuse_if_nccl_says_so(RuntimeError("something else"), DEVICE)
