"""What a server says of itself, where it cannot be right."""

from __future__ import annotations

import pytest

from streamer import IncompatibleServer, UsageError
from streamer.drivers.engine import Engine
from streamer.drivers.factory import make_driver
from streamer.drivers.sync_client import WeightSyncClient
from streamer.drivers.vllm_info import ask, version_numbers
from streamer.options import Options
from streamer.timeouts import Clock, Timeouts

SOUND = {
    "/version": {"version": "0.33.0"},
    "/get_world_size": {"world_size": 2},
    "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
}
URL = "http://host:1"
HUGE = [pytest.param(10**digits, id=f"{digits} digits") for digits in (4000, 5000)]


def asked(**answers):
    """`ask` of a server that says ``answers`` in place of what is sound."""
    said = SOUND | {f"/{name}": value for name, value in answers.items()}
    return ask(lambda path: said[path.partition("?")[0]], URL, "auto")


def test_a_sound_server():
    info = asked()
    assert (info.version, info.world_size, info.backend) == ("0.33.0", 2, "nccl")
    assert asked(get_world_size={"world_size": 65_536}).world_size == 65_536


@pytest.mark.parametrize(
    "size",
    [0, -1, True, 2.0, "2", None, 65_537, 10**6, *HUGE],
)
def test_a_world_size_that_is_nonsense_is_refused(size):
    with pytest.raises(IncompatibleServer, match="not a count of workers") as caught:
        asked(get_world_size={"world_size": size})
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.33.0", (0, 33)),
        ("0.33", (0, 33)),
        ("0.33.0rc1", (0, 33)),
        ("0.33.1.dev5+gabc", (0, 33)),
        ("v0.33.0", (0, 33)),
        ("2.28.9", (2, 28)),
    ],
)
def test_versions(version, numbers):
    assert version_numbers(version) == numbers


@pytest.mark.parametrize(
    "version",
    [
        "9" * 5000,
        "0." + "9" * 5000,
        "1" * 10,
        "1" * 10 + ".0",
        "v",
        "",
        "7",
        ".33",
        "0,33",
        "build 0.33",
        "\x1b[2Jx",
        "\x1b[2.0m0.33",
        "\u0660.\u0663",
    ],
)
def test_a_version_without_numbers_that_can_be_meant_is_none(version):
    assert version_numbers(version) == ()
    with pytest.raises(IncompatibleServer, match=r"/version names no version, but '") as caught:
        asked(version={"version": version})
    assert len(str(caught.value)) < 150


def test_a_backend_of_any_length_is_shown_in_short():
    config = {"weight_transfer_config": {"backend": "x" * 5000}}
    with pytest.raises(IncompatibleServer, match="receives with the backend 'xxx") as caught:
        asked(server_info={"vllm_config": config})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("answer", [{}, {"world_size": "two"}, {"world_size": 10**6}])
def test_a_trainer_of_vllm_s_shape_is_told_too(fake_server, reply, answer):
    fake_server.routes["GET /get_world_size"] = reply(answer)
    with pytest.raises(IncompatibleServer, match="not a count of workers"):
        WeightSyncClient(fake_server.url).get_world_size()


@pytest.mark.parametrize("size", [10**6, *HUGE])
def test_an_engine_that_is_an_object_has_no_more_workers_either(size):
    class Engines:
        world_size = size
        device = "cpu"
        backend = "streamer"

        def init_weight_transfer_engine(self, init_info): ...
        def start_weight_update(self): ...
        def update_weights(self, update_info): ...
        def finish_weight_update(self): ...

    engine = Engine(Engines(), name="mine")
    driver = make_driver(engine, Options(), Clock(Timeouts()))
    with pytest.raises(UsageError, match=r"mine says that it has .* workers: give") as caught:
        driver.probe()
    assert len(str(caught.value)) < 200
    driver.close()
