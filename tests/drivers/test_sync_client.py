"""Our HTTP client in the place of vLLM's own, driven as vLLM's trainers drive theirs."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from streamer import (
    DeadlineExceeded,
    Engine,
    ServerRefused,
    ServerUnreachable,
    UsageError,
    WeightSyncClient,
    push,
)
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline


class Trainer:
    """What vLLM's ``NCCLTrainerWeightTransferEngine`` does with a client, over Gloo.

    The real one, with real NCCL exchanged for this group, is in tests/interop.
    """

    def __init__(self, client, world_size):
        self.client = client
        self.lifeline = Lifeline.host("127.0.0.1")
        self.group = GlooTransport(self.lifeline, 0, world_size)
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.lifeline.port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": False,
        }
        with ThreadPoolExecutor(1) as side:
            joined = side.submit(client.init_weight_transfer_engine, info)
            self.group.connect(30)
            joined.result()

    def send_weights(self, tensors):
        info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).split(".")[-1] for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as side:
            received = side.submit(self.client.update_weights, info)
            for tensor in tensors.values():
                self.group.broadcast(tensor, 30)
            received.result()
        self.client.finish_weight_update()

    def close(self):
        self.group.close()
        self.lifeline.close()


@pytest.fixture
def weights(random_tensor):
    return {f"layers.{i}": random_tensor(torch.float32, (40, 30), i) for i in range(5)}


def test_a_trainer_of_vllm_s_shape_sends_through_it(server, weights):
    client = WeightSyncClient(server.url, timeout=30)
    assert client.get_world_size() == 2
    trainer = Trainer(client, 3)
    try:
        for step in range(2):
            client.pause_generation()
            assert client.is_paused()
            sent = {name: tensor + step for name, tensor in weights.items()}
            trainer.send_weights(sent)
            client.update_weight_version(f"step-{step}")
            client.reset_prefix_cache(reset_running_requests=True)
            client.resume_generation()
            assert server.holds(sent)
            assert client.get_weight_version() == f"step-{step}"
            assert not client.is_paused()
        client.shutdown_weight_transfer_engine()
    finally:
        trainer.close()


def test_it_is_an_engine_itself(server, weights, make_source):
    engine = Engine(WeightSyncClient(server.url), backend="streamer", device="cpu")
    push(make_source(weights), to=engine, weight_version="through a client")
    assert server.holds(weights)
    assert server.weight_version == "through a client"


def test_headers_go_with_every_call_and_appear_nowhere(fake_server, reply):
    client = WeightSyncClient(
        f"http://user:password@{fake_server.host}", headers={"X-Token": "tok3n-tok3n"}
    )
    fake_server.routes["POST /start_weight_update"] = reply("bad tok3n-tok3n of password", 403)
    with pytest.raises(ServerRefused) as caught:
        client.start_weight_update()
    assert "403" in str(caught.value)
    assert not re.search("tok3n|password", str(caught.value) + client.url)
    (call,) = fake_server.calls
    assert call.headers["X-Token"] == "tok3n-tok3n"
    assert call.headers["Authorization"].startswith("Basic ")


def test_every_call_has_a_deadline(fake_server, reply):
    fake_server.routes["POST /update_weights"] = reply({}, delay=20)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"POST {fake_server.url}/update_weights: no answer"):
        WeightSyncClient(fake_server.url, timeout=0.3).update_weights({"names": []})
    assert time.monotonic() - started < 5
    assert len(fake_server.posts) == 1


def test_a_call_can_be_cancelled(fake_server, reply):
    fake_server.routes["POST /update_weights"] = reply({}, delay=20)
    client = WeightSyncClient(fake_server.url)
    threading.Timer(0.3, client.cancel).start()
    with pytest.raises(ServerUnreachable, match="cancelled"):
        client.update_weights({"names": []})


def test_what_is_no_json_is_refused_before_it_is_sent(fake_server):
    client = WeightSyncClient(fake_server.url)
    with pytest.raises(UsageError, match="this update_info cannot go over HTTP"):
        client.update_weights({"ipc_handles": [object()]})
    with pytest.raises(UsageError, match="this init_info cannot go over HTTP"):
        client.init_weight_transfer_engine({"ranks": {1, 2}})
    with pytest.raises(UsageError, match="this weight_version cannot go over HTTP"):
        client.finish_weight_update(torch.float32)
    circular = {}
    circular["names"] = circular
    with pytest.raises(UsageError, match="this update_info cannot go over HTTP: Circular"):
        client.update_weights(circular)
    assert fake_server.calls == []


def test_a_mode_is_quoted(fake_server, reply):
    fake_server.routes["POST /pause"] = reply("no such mode", 400)
    for mode in ("keep me", "keep&clear_cache=false"):
        with pytest.raises(ServerRefused, match="400 no such mode"):
            WeightSyncClient(fake_server.url).pause_generation(mode)
    assert [parse_qs(urlsplit(call.path).query) for call in fake_server.calls] == [
        {"mode": ["keep me"]},
        {"mode": ["keep&clear_cache=false"]},
    ]


@pytest.mark.parametrize("headers", [{"X-Token": None}, {3: "x"}])
def test_headers_that_are_no_texts(headers):
    with pytest.raises(UsageError, match="headers must be texts by name, as "):
        WeightSyncClient("localhost:8000", headers=headers)


def test_a_timeout_that_is_none():
    with pytest.raises(UsageError, match="timeout must be a time in seconds, not 0"):
        WeightSyncClient("localhost:8000", timeout=0)
