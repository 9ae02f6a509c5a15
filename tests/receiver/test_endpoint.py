"""What a worker is told when it joins, and what it does without."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time

import pytest
import torch

from streamer import PlanError, StreamerError, TransportError
from streamer.receiver.endpoint import Endpoint, InitInfo
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline

pytestmark = pytest.mark.timeout(60)

GLOO = {"rank_offset": 1, "world_size": 3, "master_address": "10.0.0.1", "master_port": 29500}
UNIQUE_ID = base64.b64encode(bytes(range(128))).decode()


def test_what_our_driver_sends():
    info = InitInfo.parse(
        {**GLOO, "packed": True, "packed_buffer_size_bytes": 64, "packed_num_buffers": 3}
    )
    assert (info.rank_offset, info.world_size) == (1, 3)
    assert (info.master_address, info.master_port) == ("10.0.0.1", 29500)
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, 64, 3)
    assert info.nccl_unique_id_b64 is None


def test_what_a_trainer_that_knows_only_vllm_sends():
    """The defaults are vLLM's: packed off, a buffer of 1 GiB."""
    info = InitInfo.parse({"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": UNIQUE_ID})
    assert info.packed is False
    assert info.packed_buffer_size_bytes == 1 << 30
    assert info.master_address is None


@pytest.mark.parametrize(
    ("init_info", "named"),
    [
        ({}, "rank_offset"),
        ({"rank_offset": 1, "nccl_unique_id_b64": UNIQUE_ID}, "world_size"),
        ({**GLOO, "colour": "red"}, "colour"),
        ({**GLOO, "master_port": None}, "master_address and master_port come together"),
        ({"rank_offset": 1, "world_size": 2, "master_port": 1}, "come together"),
        (
            {"rank_offset": 1, "world_size": 2},
            "neither nccl_unique_id_b64 nor master_address is given",
        ),
    ],
)
def test_a_malformed_init_is_refused(init_info, named):
    with pytest.raises(PlanError) as caught:
        InitInfo.parse(init_info)
    assert str(caught.value).startswith("init_info: ")
    assert named in str(caught.value)
    assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_offset", "1"),
        ("rank_offset", None),
        ("world_size", 2.5),
        ("world_size", True),
        ("master_port", "29500"),
        ("master_address", 10),
        ("packed", "yes"),
        ("packed_buffer_size_bytes", "64"),
        ("packed_buffer_size_bytes", 0),
        ("nccl_unique_id_b64", 5),
        ("join_seconds", "60"),
        ("join_seconds", 0),
        ("join_seconds", True),
        ("join_seconds", float("nan")),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(key, value):
    """Later it would be a TypeError somewhere else, or a chunk that never closes."""
    with pytest.raises(PlanError, match=key):
        InitInfo.parse({**GLOO, key: value})


def endpoint():
    return Endpoint(torch.device("cpu"), 0)


def joined(end, update_open=False, **more):
    """A trainer's lifeline and its end of the group, which ``end`` has joined."""
    host = Lifeline.host("127.0.0.1")
    trainer = GlooTransport(host, 0, 2)
    info = InitInfo(rank_offset=1, world_size=2, **host.rendezvous(), **more)
    joining = threading.Thread(target=end.join, args=(info,), kwargs={"update_open": update_open})
    joining.start()
    trainer.connect(20)
    joining.join()
    return host, trainer


def receive(end, names=("w",), shapes=((2,),)):
    got = {}
    end.receive(
        {"names": list(names), "dtype_names": ["float32"] * len(names),
         "shapes": [list(shape) for shape in shapes]},
        lambda n: torch.empty(n, dtype=torch.uint8),
        got.update,
    )  # fmt: skip
    return got


def test_receiving_before_joining_says_what_to_call():
    with pytest.raises(TransportError, match="POST /init_weight_transfer_engine first"):
        receive(endpoint())


def test_leaving_is_idempotent_and_aborting_harmless():
    end = endpoint()
    end.abort("nothing to abort")
    end.leave()
    end.leave()


def test_a_trainer_that_is_not_there_is_named(free_port):
    port = free_port()
    end = endpoint()
    info = InitInfo(rank_offset=1, world_size=2, master_address="127.0.0.1", master_port=port)
    with pytest.raises(TransportError, match=f"does not answer at 127.0.0.1:{port}"):
        end.join(info, update_open=False)
    with pytest.raises(TransportError, match="not connected to a trainer"):
        receive(end)


@pytest.mark.parametrize("text", ["not base64!", "", "AAAA", UNIQUE_ID.replace("+", "-") + "%"])
def test_an_id_that_is_none_is_refused(text):
    info = InitInfo(rank_offset=1, world_size=2, nccl_unique_id_b64=text)
    with pytest.raises(StreamerError):
        endpoint().join(info, update_open=False)


def test_a_worker_joins_for_as_long_as_the_trainer_says(monkeypatch):
    """Longer than it would by itself."""
    monkeypatch.setattr("streamer.receiver.endpoint.JOIN_SECONDS", 0.5)
    host = Lifeline.host("127.0.0.1")
    trainer = GlooTransport(host, 0, 2)
    end = endpoint()
    info = InitInfo(rank_offset=1, world_size=2, join_seconds=20, **host.rendezvous())
    joining = threading.Thread(target=end.join, args=(info,), kwargs={"update_open": False})
    joining.start()
    time.sleep(2)
    trainer.connect(20)
    joining.join()
    trainer.close()
    host.close()
    end.leave()


@pytest.mark.parametrize("there", [True, False], ids=["ranks missing", "trainer mute"])
def test_a_worker_gives_up_joining_when_the_trainer_says(there):
    """Sooner than it would by itself, and in all: not for each step anew."""
    with contextlib.ExitStack() as stack:
        if there:
            host = stack.enter_context(contextlib.closing(Lifeline.host("127.0.0.1")))
            way = host.rendezvous()
        else:
            mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            way = {"master_address": "127.0.0.1", "master_port": mute.getsockname()[1]}
        info = InitInfo(rank_offset=1, world_size=3, join_seconds=1, **way)
        started = time.monotonic()
        with pytest.raises(StreamerError):
            endpoint().join(info, update_open=False)
        assert time.monotonic() - started < 10


def test_a_time_that_torch_cannot_count_is_cut():
    end = endpoint()
    host, trainer = joined(end, join_seconds=1e9)
    trainer.close()
    host.close()
    end.leave()


def test_a_rank_outside_the_group_is_refused():
    host = Lifeline.host("127.0.0.1")
    info = InitInfo(rank_offset=2, world_size=2, **host.rendezvous())
    with pytest.raises(TransportError, match="rank 2 is not in a group of world size 2"):
        endpoint().join(info, update_open=False)
    host.close()


def test_it_joins_reports_receives_and_joins_again(leaks, eventually):
    """A second trainer takes over without a word from the first."""
    end = endpoint()
    for value in (1.0, 2.0):
        host, trainer = joined(end, update_open=True)
        assert host.reported(1) == {"update_open": True}
        got = {}
        receiving = threading.Thread(target=lambda got=got: got.update(receive(end)))
        receiving.start()
        trainer.broadcast(torch.full((2,), value), 20)
        receiving.join()
        assert got["w"].tolist() == [value, value]
        trainer.close()
        host.close()
    end.leave()
    eventually(lambda: leaks()["threads"] == 0)


def test_empty_lists_mean_those_of_the_last_call():
    end = endpoint()
    host, trainer = joined(end)
    for lists in ({}, {"names": (), "shapes": ()}, {"names": (), "shapes": ()}):
        got = {}
        receiving = threading.Thread(
            target=lambda got=got, lists=lists: got.update(receive(end, **lists))
        )
        receiving.start()
        trainer.broadcast(torch.full((2,), 3.0), 20)
        receiving.join()
        assert got["w"].tolist() == [3.0, 3.0]
    with pytest.raises(PlanError):
        receive(end, shapes=((-1,),))
    trainer.close()
    host.close()
    end.leave()


def test_a_trainer_that_goes_wakes_a_worker_that_receives(eventually):
    end = endpoint()
    host, trainer = joined(end)
    errors = []

    def run():
        try:
            receive(end)
        except TransportError as error:
            errors.append(error)

    receiving = threading.Thread(target=run)
    receiving.start()
    trainer.close()
    host.close()
    receiving.join(10)
    assert len(errors) == 1
    end.leave()
