"""Asking a server what it is, and what can be sent to it."""

from __future__ import annotations

import pytest
import torch

from kit_fake_vllm import SPECS, START_WITH
from streamer import IncompatibleServer, PlanError, ServerRefused, TensorSpec, make_plan
from streamer.drivers.base import JoinInfo
from streamer.drivers.vllm import PER_TENSOR_DTYPES

pytestmark = pytest.mark.timeout(60)


def test_what_a_server_says_of_itself(driver, vllm):
    vllm.world_size = 4
    info = driver(probe=False).probe()
    assert (info.version, info.world_size, info.backend, info.device) == (
        "0.33.0", 4, "nccl", "cuda",
    )  # fmt: skip
    assert info.url == vllm.fake.url
    assert vllm.fake.posts == [], "asking changes nothing"


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0rc1+cu130", "0.33.0+streamer.0.1", "1.0"])
def test_versions_that_work(driver, vllm, version):
    vllm.version = version
    assert driver(probe=False).probe().version == version


@pytest.mark.parametrize("version", ["0.29.1", "0.5.4", "0.0.0"])
def test_an_old_version(driver, vllm, version):
    vllm.version = version
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert str(caught.value) == (
        f"{vllm.fake.url} runs vLLM {version}; streamer speaks the protocol of 0.30 and later: "
        "upgrade the server"
    )


@pytest.mark.parametrize("version", ["", "dev", None])
def test_a_version_that_is_none(driver, vllm, version):
    vllm.version = version
    with pytest.raises(IncompatibleServer, match="/version names no version"):
        driver(probe=False).probe()


@pytest.mark.parametrize("value", [0, -1, "two", "2", True, 1.0, None, [2]])
def test_a_world_size_that_is_nonsense(driver, vllm, value):
    """Case 36."""
    vllm.world_size = value
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert str(caught.value) == (
        f"{vllm.fake.url}: /get_world_size answered {value!r}, not a count of workers"
    )


@pytest.mark.parametrize("path", ["/get_world_size", "/server_info", "/weight_info"])
def test_a_server_without_dev_mode(driver, vllm, path):
    """Case 35."""
    vllm.fail(path, 404, {"detail": "Not Found"})
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert f"{vllm.fake.url} has no {path} (404)" in str(caught.value)
    assert START_WITH in str(caught.value)


def test_what_has_no_version_is_no_server_whatever_it_was_started_with(driver, vllm):
    vllm.fail("/version", 404, {"detail": "Not Found"})
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    url = vllm.fake.url
    assert str(caught.value) == (
        f"{url} has no /version (404): give the URL of the inference server itself"
    )


@pytest.mark.parametrize(
    "path", ["/is_paused", "/pause", "/update_weight_version", "/start_weight_update"]
)
def test_a_route_that_is_missing_when_a_sync_begins(driver, vllm, path):
    """Case 35: the same remedy, wherever it shows."""
    one = driver()
    vllm.fail(path, 404, {"detail": "Not Found"})
    with pytest.raises(IncompatibleServer) as caught:
        one.begin("v2")
    assert path in str(caught.value)
    assert START_WITH in str(caught.value)


def test_an_init_route_that_is_missing(driver, vllm):
    one = driver()
    vllm.fail("/init_weight_transfer_engine", 404, {"detail": "Not Found"})
    with pytest.raises(IncompatibleServer, match=START_WITH):
        one.join(JoinInfo({}, 1, 2, True, 64, 2))


@pytest.mark.parametrize("path", ["/version", "/get_world_size", "/server_info", "/weight_info"])
def test_some_other_web_server(driver, vllm, path):
    """Case 35: 200 with an HTML page."""
    vllm.fail(path, 200, "<html>It works!</html>")
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert f"{vllm.fake.url}{path}" in str(caught.value)
    assert "not a JSON object; does this URL lead to an inference server?" in str(caught.value)


def test_a_server_error_while_asking_is_told_as_it_is(driver, vllm):
    vllm.fail("/get_world_size", 503, {"error": {"message": "engine is dead"}})
    with pytest.raises(ServerRefused, match="/get_world_size: 503 engine is dead"):
        driver(probe=False).probe()


def test_a_server_without_a_backend(driver, vllm):
    vllm.backend = None
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert f"{vllm.fake.url} was started without a weight-transfer backend" in str(caught.value)
    assert START_WITH in str(caught.value)


@pytest.mark.parametrize("backend", ["ipc", "sparse", 5])
def test_an_unknown_backend(driver, vllm, backend):
    vllm.backend = backend
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert f"receives with the backend {backend!r}" in str(caught.value)
    assert "nccl" in str(caught.value)


def test_the_backend_can_be_chosen_by_hand(driver, vllm):
    vllm.backend = "wrapped_nccl"
    assert driver(probe=False, backend="nccl").probe().backend == "nccl"


@pytest.mark.parametrize("info", [{}, {"vllm_config": "text"}, {"vllm_config": {}}])
def test_server_info_in_another_shape(driver, vllm, info):
    """Its text holds the environment of the server: it must not be shown."""
    vllm.do_server_info = lambda body: {**info, "system_env": {"TOKEN": "sekrit"}}
    with pytest.raises(IncompatibleServer) as caught:
        driver(probe=False).probe()
    assert "sekrit" not in str(caught.value)


# What can be sent: case 16.


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool, torch.complex64, torch.int16])
def test_a_dtype_that_vllm_s_engine_does_not_know_per_tensor(driver, vllm, dtype):
    one = driver()
    plan = make_plan([*SPECS, TensorSpec("odd.one", dtype, (4,))], packed=False)
    with pytest.raises(PlanError) as caught:
        one.check(plan)
    name = str(dtype).removeprefix("torch.")
    assert f"tensor odd.one: {vllm.fake.url} cannot receive {name}" in str(caught.value)
    assert vllm.fake.posts == []


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool, torch.complex64, torch.int16])
def test_any_dtype_can_be_sent_packed_or_to_our_engine(driver, vllm, dtype):
    specs = [TensorSpec("odd.one", dtype, (4,))]
    driver().check(make_plan(specs, packed=True))
    vllm.backend = "streamer"
    driver().check(make_plan(specs, packed=False))


def test_what_vllm_s_engine_knows_per_tensor(driver):
    specs = [TensorSpec(str(dtype), dtype, (4,)) for dtype in PER_TENSOR_DTYPES]
    assert torch.float8_e4m3fn in PER_TENSOR_DTYPES
    driver().check(make_plan(specs, packed=False))
