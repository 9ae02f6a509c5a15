"""``streamer doctor``: every finding has its remedy, and nothing is changed on any server."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import save_file

from streamer import IncompatibleServer, TensorSpec, gpus, push
from streamer.broadcast.fill import SLOT_SIZE
from streamer.broadcast.staging import RING_SIZE
from streamer.defaults import DEFAULT_THREADS
from streamer.doctor import here, weights
from streamer.doctor.server import _POSTS
from streamer.drivers.mark import INCOMPLETE
from streamer.sizes import format_size
from streamer.transport import _libnccl

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def findings(invoke: Callable[..., Any]) -> Callable[..., dict[str, dict[str, str]]]:
    """What the command finds, by name; of several servers the last one's. Checks the exit code."""

    def run(*arguments: object) -> dict[str, dict[str, str]]:
        ended = invoke("doctor", *arguments, "--json")
        assert ended.stderr == ""
        assert ended.stdout.count("\n") == 1
        value = json.loads(ended.stdout)
        statuses = [item["status"] for item in value["findings"]]
        assert set(statuses) <= {"ok", "warn", "fail"}
        assert value["ok"] == ("fail" not in statuses)
        assert ended.code == (0 if value["ok"] else 1)
        for item in value["findings"]:
            assert item["text"].isprintable()
            assert bool(item["remedy"]) == (item["status"] != "ok"), item
        return {item["name"]: item for item in value["findings"]}

    return run


class Stub:
    """A server that says what the test wants, and has a route for all that a push calls."""

    def __init__(self, fake: Any, reply: Callable[..., Any]) -> None:
        self.fake, self.reply, self.url = fake, reply, fake.url
        self.backend: object = "streamer"
        self.device = "cpu"
        self.instance = ""
        self.system: dict[str, object] = {}
        fake.routes["GET /health"] = reply("")
        self.say("version", version="0.33.0")
        self.say("get_world_size", world_size=1)
        self.say("weight_info", weight_version="default")
        self.say("is_paused", is_paused=False)
        for path in _POSTS:
            fake.routes[f"GET {path}"] = reply({"detail": "Method Not Allowed"}, 405)
        fake.routes["GET /server_info"] = lambda handler: reply(self.info())(handler)

    def say(self, path: str, **values: object) -> None:
        self.fake.routes[f"GET /{path}"] = self.reply(values)

    def info(self) -> object:
        transfer = None if self.backend is None else {"backend": self.backend}
        config = {"weight_transfer_config": transfer, "device_config": {"device": self.device}}
        config |= {"instance_id": self.instance} if self.instance else {}
        return {"vllm_config": config, "system_env": self.system}


@pytest.fixture
def stub(fake_server: Any, reply: Callable[..., Any]) -> Stub:
    return Stub(fake_server, reply)


def check(found: dict[str, str], status: str, text: str, remedy: str) -> None:
    assert found["status"] == status, found
    assert text in found["text"]
    assert remedy in found["remedy"]


def test_a_server_that_is_fine(findings: Callable[..., Any], server: Any, checkpoint: Path) -> None:
    found = findings(checkpoint, "--to", server.url, "--verify")
    assert {item["status"] for item in found.values()} == {"ok"}
    assert list(found) == [
        "reachable",
        "version",
        "health",
        "development mode",
        "world size",
        "backend",
        "proof of arrival",
        "paused",
        "complete",
        "settings there",
        "settings here",
        "one group",
        "device",
        "open files",
        "address",
        "port",
        "source",
        "names and dtypes",
        "staging memory",
    ]
    assert found["world size"]["text"] == "2, and 3 ranks with this one"
    assert found["backend"]["text"] == "streamer on cpu (our own)"
    assert f"torch {torch.__version__}" in found["settings there"]["text"]
    assert found["source"]["text"] == "4 tensors, 2.15 kB"
    assert "bfloat16, float16, float32, int64 in 1 chunk" in found["names and dtypes"]["text"]
    assert found["reachable"]["server"] == server.url
    assert found["settings here"]["server"] == ""


def test_it_changes_nothing(findings: Callable[..., Any], server: Any, checkpoint: Path) -> None:
    before = server.checksums()
    server.heal()
    findings(checkpoint, "--to", server.url, "--verify")
    assert not [call for call in server.calls if not call.startswith("GET ")]
    assert server.weight_version == "default"
    assert not server.paused
    assert server.checksums() == before


def test_in_a_pipe_a_finding_is_a_line(
    run: Callable[..., Any], server: Any, free_port: Callable[[], int]
) -> None:
    other = f"http://127.0.0.1:{free_port()}"
    ended = run("doctor", "--to", server.url, "--to", other)
    assert (ended.code, ended.stderr) == (1, "")
    lines = [line.split("\t") for line in ended.stdout.splitlines()]
    assert {len(line) for line in lines} == {4}
    assert lines[0] == ["ok", f"reachable {server.url}", f"{server.url} answers", ""]
    assert ["fail", f"reachable {other}"] in [line[:2] for line in lines]


def test_on_a_terminal_it_ends_with_a_verdict(on_terminal: Callable[..., Any], server: Any) -> None:
    good = on_terminal("stdout", "doctor", "--to", server.url)
    assert good.code == 0
    assert good.stdout.rstrip().endswith("A push should work.")
    bad = on_terminal("stdout", "doctor", "--to", server.url, "--address", "0.0.0.0")
    assert bad.code == 1
    assert bad.stdout.rstrip().endswith("1 check failed: a push would too.")


# The server.


def test_nobody_there(findings: Callable[..., Any], free_port: Callable[[], int]) -> None:
    found = findings("--to", f"http://127.0.0.1:{free_port()}")
    check(found["reachable"], "fail", "Connection refused", "start the server, or correct --to")
    assert "version" not in found
    assert found["settings here"]["status"] == "ok"


def test_a_server_that_never_answers(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.fake.routes["GET /version"] = reply({}, delay=30)
    found = findings("--to", stub.url, "--progress-timeout", 1)
    check(
        found["reachable"],
        "fail",
        "no answer after 1 s; look at the server's log",
        "start the server",
    )


def test_a_page_and_a_redirect(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.fake.routes["GET /version"] = reply("<html>hello</html>")
    check(findings("--to", stub.url)["reachable"], "fail", "not a JSON", "inference server itself")
    stub.fake.routes["GET /version"] = reply("", 301, {"Location": "https://elsewhere/"})
    check(findings("--to", stub.url)["reachable"], "fail", "redirected", "inference server itself")


@pytest.mark.parametrize("path", ["version", "weight_info"])
def test_a_key_that_is_wanted_is_asked_for_and_never_shown(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any], path: str
) -> None:
    stub.fake.routes[f"GET /{path}"] = reply({"error": "not with Bearer s3cret-key"}, 401)
    found = findings("--to", stub.url, "--api-key", "s3cret-key")
    name = "reachable" if path == "version" else "development mode"
    check(found[name], "fail", "401", "give its key with --api-key or STREAMER_API_KEY")
    assert "s3cret-key" not in json.dumps(found)


def test_the_key_is_sent(findings: Callable[..., Any], stub: Stub) -> None:
    found = findings("--to", stub.url, "--api-key", "s3cret-key")
    assert "fail" not in {item["status"] for item in found.values()}
    sent = [requests.structures.CaseInsensitiveDict(call.headers) for call in stub.fake.calls]
    assert {headers["Authorization"] for headers in sent} == {"Bearer s3cret-key"}
    assert "s3cret-key" not in json.dumps(found)


@pytest.mark.parametrize("path", ["/get_world_size", "/start_weight_update"])
def test_routes_that_are_not_there(findings: Callable[..., Any], stub: Stub, path: str) -> None:
    """Case 35."""
    del stub.fake.routes[f"GET {path}"]
    found = findings("--to", stub.url)["development mode"]
    check(found, "fail", f"no {path} (404)", "start the server with VLLM_SERVER_DEV_MODE=1")


def test_an_update_that_is_under_way(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.fake.routes["GET /is_paused"] = reply({}, delay=30)
    found = findings("--to", stub.url, "--progress-timeout", 1)["development mode"]
    check(found, "fail", "an update is under way, or a worker hangs", "restart the server")


def test_a_server_that_hangs_is_not_asked_further(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    for path in [path for path in stub.fake.routes if path != "GET /version"]:
        stub.fake.routes[path] = reply({}, delay=30)
    found = findings("--to", stub.url, "--progress-timeout", 1)
    check(
        found["health"],
        "warn",
        "no answer after 1 s; look at the server's log",
        "look into the server's log",
    )
    text = f"an update is under way, or a worker hangs: GET {stub.url}/get_world_size: no answer"
    check(found["development mode"], "fail", text, "restart the server")
    assert [call.path for call in stub.fake.calls] == ["/version", "/health", "/get_world_size"]


def test_a_server_that_has_lost_a_worker(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.fake.routes["GET /health"] = reply("", 503)
    found = findings("--to", stub.url)
    check(found["health"], "fail", "its engine or a worker has died", "restart the server")
    assert "backend" not in found
    del stub.fake.routes["GET /health"]
    check(findings("--to", stub.url)["health"], "warn", "404", "look into the server's log")


def test_a_worker_of_the_reference_server_that_was_killed(
    findings: Callable[..., Any],
    start_server: Callable[..., Any],
    eventually: Callable[..., None],
) -> None:
    server = start_server()
    os.kill(server.pids[0], signal.SIGKILL)
    eventually(lambda: requests.get(f"{server.url}/health", timeout=5).status_code == 503)
    check(findings("--to", server.url)["health"], "fail", "has died", "restart the server")


@pytest.mark.parametrize(
    ("instances", "same"), [(("", ""), True), (("a1b2c", "a1b2c"), True), (("a1b2c", "f00"), False)]
)
def test_one_server_under_two_urls(
    findings: Callable[..., Any], stub: Stub, instances: tuple[str, str], same: bool
) -> None:
    """vLLM tells its instance. One that tells none is where its URL leads to."""
    host = stub.url.replace("127.0.0.1", "localhost")

    def info(handler: Any) -> None:  # one port may lead to several servers, each by its name
        stub.instance = instances["localhost" in handler.headers["Host"]]
        stub.reply(stub.info())(handler)

    stub.fake.routes["GET /server_info"] = info
    found = findings("--to", stub.url, "--to", host)["each once"]
    if same:
        check(found, "fail", f"{stub.url} and {host} lead to one server", "give each server once")
    else:
        assert (found["status"], found["text"]) == ("ok", "2 servers")


def test_a_secret_in_what_a_server_says_is_not_shown(
    findings: Callable[..., Any], stub: Stub
) -> None:
    stub.say("version", version="0.33.0+s3cret-key")
    stub.say("weight_info", weight_version="v-s3cret-key")
    stub.system = {"env_vars": "NCCL_X=s3cret-key", "torch_version": "s3cret-key"}
    found = findings("--to", stub.url, "--header", "X-Key: s3cret-key")
    assert found["complete"]["text"] == "it serves v-…"
    assert found["version"]["text"].startswith("vLLM 0.33.0+…")
    assert "s3cret" not in json.dumps(found)


def test_a_server_that_fails_is_not_taken_for_one_that_says_no(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.fake.routes["GET /server_info"] = reply({"error": {"message": "engine dead"}}, 500)
    found = findings("--to", stub.url)
    check(found["development mode"], "fail", "500 engine dead", "look into the server's log")
    assert "backend" not in found
    stub.fake.routes["GET /server_info"] = lambda handler: reply(stub.info())(handler)
    stub.say("is_paused", is_paused="perhaps")
    check(findings("--to", stub.url)["paused"], "fail", "'perhaps'", "the URL of a vLLM server")


def test_versions_that_cannot_work(findings: Callable[..., Any], stub: Stub) -> None:
    stub.say("version", version="0.29.1")
    found = findings("--to", stub.url)["version"]
    check(found, "fail", "vLLM 0.29.1", "upgrade the server to vLLM 0.30 or later")
    stub.say("version", version="9" * 5000)
    check(findings("--to", stub.url)["version"], "fail", "'9999", "the URL of a vLLM server")
    for version in ("none", "\x1b[2Jx"):
        stub.say("version", version=version)
        found = findings("--to", stub.url)["version"]
        check(found, "fail", repr(version), "the URL of a vLLM server")


@pytest.mark.parametrize("size", [0, -1, "two", None, True, 10**6])
def test_a_world_size_that_is_none(findings: Callable[..., Any], stub: Stub, size: object) -> None:
    """Case 36."""
    stub.say("get_world_size", world_size=size)
    check(findings("--to", stub.url)["world size"], "fail", repr(size), "VLLM_SERVER_DEV_MODE=1")


@pytest.mark.parametrize(
    ("backend", "device", "asked", "text", "remedy"),
    [
        (None, "cuda", "auto", "none", '--weight-transfer-config \'{"backend": "nccl"}\''),
        ("ipc", "cuda", "auto", "ipc", "--weight-transfer-config"),
        ("nccl", "cuda", "streamer", "--backend streamer", "leave --backend away, or give nccl"),
        ("nccl", "cpu", "auto", "nccl on a CPU", "install streamer beside vLLM"),
    ],
)
def test_backends_that_cannot_receive(
    findings: Callable[..., Any],
    stub: Stub,
    backend: str | None,
    device: str,
    asked: str,
    text: str,
    remedy: str,
) -> None:
    stub.backend, stub.device = backend, device
    check(findings("--to", stub.url, "--backend", asked)["backend"], "fail", text, remedy)


def test_a_proof_that_cannot_be_had(
    findings: Callable[..., Any], stub: Stub, reply: Callable[..., Any]
) -> None:
    stub.backend, stub.device = "nccl", "cuda"
    found = findings("--to", stub.url, "--verify")["proof of arrival"]
    check(found, "fail", "no /weight_checker", "vLLM 0.32 or later, or push without --verify")
    stub.fake.routes["GET /weight_checker"] = reply({}, 405)
    assert findings("--to", stub.url, "--verify")["proof of arrival"]["status"] == "ok"


def test_a_server_that_somebody_has_paused(findings: Callable[..., Any], stub: Stub) -> None:
    stub.say("is_paused", is_paused=True)
    check(findings("--to", stub.url)["paused"], "warn", "not by a sync", "POST /resume to it")


def test_a_server_that_holds_a_mixture(findings: Callable[..., Any], stub: Stub) -> None:
    stub.say("is_paused", is_paused=True)
    stub.say("weight_info", weight_version=f"{INCOMPLETE}v2")
    found = findings("--to", stub.url)
    check(found["paused"], "warn", "by a sync that failed", "push again")
    check(found["complete"], "warn", f"marked {INCOMPLETE}v2: it may hold a mixture", "push again")
    stub.backend, stub.device = "nccl", "cuda"
    stub.say("get_world_size", world_size=2)
    found = findings("--to", stub.url)
    check(found["complete"], "warn", "out of step", "restart it if the next push fails")


# This host, and what lies between.


def test_settings_of_nccl_are_shown_and_nothing_else(
    findings: Callable[..., Any], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    stub.system = {
        "torch_version": "2.11.0",
        "env_vars": "NCCL_DEBUG=WARN\nOMP_X=s3cret\nCUDA_VISIBLE_DEVICES=3\n",
        "pip_packages": "torch==2.11.0\nnvidia-nccl-cu13==2.28.9\nx==s3cret",
    }
    found = findings("--to", stub.url)
    assert found["settings there"]["text"] == (
        "torch 2.11.0, NCCL 2.28.9, CUDA_VISIBLE_DEVICES=3 NCCL_DEBUG=WARN"
    )
    assert "NCCL_SOCKET_IFNAME=eth7" in found["settings here"]["text"]
    assert "s3cret" not in json.dumps(found)


def test_servers_that_differ(
    findings: Callable[..., Any], server: Any, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.backend, stub.device = "nccl", "cuda"
    found = findings("--to", server.url, "--to", stub.url)["one group"]
    kinds = f"({server.url}: streamer on cpu; {stub.url}: nccl on cuda): push to them separately"
    check(found, "fail", kinds, "push to each kind alone")


def test_an_address_that_leads_nowhere(findings: Callable[..., Any], stub: Stub) -> None:
    for address in ("0.0.0.0", "::", "no-such-host.invalid"):
        found = findings("--to", stub.url, "--address", address)["address"]
        check(found, "fail", address, "that the servers reach with --address, or none")


def test_loopback_with_a_server_elsewhere(
    findings: Callable[..., Any], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.network.is_here", lambda host: False)
    found = findings("--to", stub.url, "--address", "127.0.0.1")["address"]
    check(found, "fail", f"leads workers of {stub.url} to their own host", "with --address, or non")


def test_an_address_of_somebody_else(findings: Callable[..., Any], stub: Stub) -> None:
    found = findings("--to", stub.url, "--address", "192.0.2.1")
    check(found["address"], "fail", "192.0.2.1 is no address of this host", "with --address, or no")
    assert "port" not in found


def test_too_few_open_files(
    findings: Callable[..., Any], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.say("get_world_size", world_size=4000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 20))
    found = findings("--to", stub.url)
    check(found["open files"], "fail", "a group of 4000 workers takes up to", "ulimit -n")
    assert "port" not in found


def test_a_port_that_is_taken(findings: Callable[..., Any], stub: Stub) -> None:
    """Case 39."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings("--to", stub.url, "--port", port)["port"]
    check(found, "fail", f"127.0.0.1:{port}: Address already in use", "another --port, or 0")
    assert findings("--to", stub.url, "--port", port)["port"]["text"] == str(port)


def test_no_gpu_here(findings: Callable[..., Any], stub: Stub) -> None:
    stub.device = "cuda"
    found = findings("--to", stub.url)["device"]
    check(found, "fail", "torch sees none here", "run the trainer where there is a GPU")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """As if there were two GPUs here, the first of which a server has filled: bytes in use."""
    used = {"cuda:0": 100 << 30, "cuda:1": 1 << 30}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "get_device_name": lambda device: "NVIDIA H200",
        "get_device_properties": lambda device: type("P", (), {"uuid": f"abc-{device.index}"}),
        "mem_get_info": lambda device: ((140 << 30) - used[str(device)], 140 << 30),
        "memory_reserved": lambda device: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_libnccl, "version", lambda: "2.28.9")
    return used


@pytest.mark.parametrize(
    ("there", "here", "device", "shared"),
    [
        ("0", None, "cuda:0", True),
        ("0", None, "cuda:1", False),
        (None, None, "cuda:0", True),
        ("1", None, "cuda:0", False),
        ("GPU-abc-0", None, "cuda:0", True),
        ("GPU-abc-1", None, "cuda:0", False),
        ("3,4", "3,5", "cuda:0", True),
        ("4,3", "3,5", "cuda:0", False),  # one worker, on the first of them
        ("", None, "cuda:0", False),
    ],
)
def test_a_server_on_the_gpu_that_sends(
    findings: Callable[..., Any],
    stub: Stub,
    two_gpus: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    there: str | None,
    here: str | None,
    device: str,
    shared: bool,
) -> None:
    """Case 40: found by doctor, and by a push before it changes anything."""
    stub.device = "cuda"
    stub.system = {"env_vars": "" if there is None else f"CUDA_VISIBLE_DEVICES={there}\n"}
    if here is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    found = findings("--to", stub.url, "--device", device)["GPU of its own"]
    if not shared:
        assert found["status"] == "ok"
        return
    check(found, "fail", f"a worker is on the GPU that sends, {device}", "with --device, or start")
    with pytest.raises(IncompatibleServer, match=f"the GPU that sends, {device}.*--device cuda:1"):
        push({"w": torch.ones(3)}, stub.url, device=device)
    assert stub.fake.posts == []


def test_a_gpu_that_nobody_else_uses_is_not_the_server_s(
    findings: Callable[..., Any], stub: Stub, two_gpus: dict[str, int]
) -> None:
    """In a container of its own a server's number 0 may be another GPU."""
    two_gpus["cuda:0"] = 1 << 30
    stub.device, stub.system = "cuda", {"env_vars": "CUDA_VISIBLE_DEVICES=0"}
    assert findings("--to", stub.url)["GPU of its own"]["status"] == "ok"


def test_a_server_elsewhere_has_gpus_of_its_own(
    findings: Callable[..., Any],
    stub: Stub,
    two_gpus: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "is_here", lambda host: False)
    stub.device, stub.system = "cuda", {"env_vars": "CUDA_VISIBLE_DEVICES=0"}
    assert findings("--to", stub.url)["GPU of its own"]["status"] == "ok"


def test_what_nccl_says_of_one_gpu_is_made_plain() -> None:
    try:
        try:
            raise RuntimeError("invalid usage (Duplicate GPU detected : rank 0 and rank 1 both on)")
        except RuntimeError as cause:
            raise IncompatibleServer("500 unhandled") from cause
    except IncompatibleServer as error:
        said = error
    with pytest.raises(IncompatibleServer, match="the GPU that sends, cuda:0, and NCCL takes one"):
        gpus.refuse_if_nccl_says_so(said, torch.device("cuda:0"))
    gpus.refuse_if_nccl_says_so(RuntimeError("something else"), torch.device("cuda:0"))


def test_releases_of_nccl_that_differ(
    findings: Callable[..., Any], stub: Stub, two_gpus: dict[str, int]
) -> None:
    stub.device = "cuda"
    stub.system = {"pip_packages": "nvidia-nccl-cu12==2.27.5"}
    found = findings("--to", stub.url)["NCCL versions"]
    check(found, "warn", "2.28.9 here, and 2.27.5", "the same nvidia-nccl package on both sides")
    stub.system = {"pip_packages": "nvidia-nccl-cu13==2.28.3"}
    assert findings("--to", stub.url)["NCCL versions"]["status"] == "ok"


# The source, and the memory for it.


def test_a_source_that_cannot_be_read(
    findings: Callable[..., Any], stub: Stub, tmp_path: Path
) -> None:
    found = findings(tmp_path / "nothing", "--to", stub.url)["source"]
    check(found, "fail", "no such file or folder", "correct SOURCE, or repair")
    (tmp_path / "model.safetensors").write_bytes(b"")
    found = findings(tmp_path, "--to", stub.url)["source"]
    check(found, "fail", "model.safetensors", "correct SOURCE, or repair")


@pytest.mark.parametrize(
    "option", [("--select", "nope"), ("--rename", "zzz=y"), ("--option", "nope=1")]
)
def test_an_option_that_does_not_fit_the_source_is_to_be_corrected_itself(
    findings: Callable[..., Any], stub: Stub, checkpoint: Path, option: tuple[str, str]
) -> None:
    found = findings(checkpoint, "--to", stub.url, *option)["source"]
    check(found, "fail", "", "correct that option")


def test_a_source_is_looked_at_without_a_server(
    findings: Callable[..., Any], checkpoint: Path, free_port: Callable[[], int]
) -> None:
    found = findings(checkpoint, "--to", f"http://127.0.0.1:{free_port()}")
    assert found["source"]["status"] == "ok"


def test_dtypes_that_the_server_does_not_know(
    findings: Callable[..., Any], stub: Stub, two_gpus: dict[str, int], tmp_path: Path
) -> None:
    stub.backend, stub.device = "nccl", "cuda"
    save_file({"mask": torch.ones(3, dtype=torch.bool)}, tmp_path / "model.safetensors")
    found = findings(tmp_path, "--to", stub.url, "--device", "cuda:1", "--per-tensor")
    check(found["names and dtypes"], "fail", "tensor mask", "push packed, without --per-tensor")
    found = findings(tmp_path, "--to", stub.url, "--device", "cuda:1")
    assert found["names and dtypes"]["status"] == "ok"


def test_names_that_come_twice() -> None:
    specs = [TensorSpec("w", torch.float32, (3,))] * 2
    found, plan = weights.sendable(specs, [], weights.Options())
    assert plan is None
    assert (found.status, found.remedy) == ("fail", "rename or exclude one: --rename, --exclude")


@pytest.mark.parametrize(("free", "status"), [(100, "fail"), (3 * 2000, "warn"), (1 << 40, "ok")])
def test_memory_that_is_short(
    findings: Callable[..., Any],
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    status: str,
) -> None:
    monkeypatch.setattr(weights, "free_host_memory", lambda: free)
    found = findings("--to", stub.url, "--buffer-size", "2000B", "--num-buffers", 3)[
        "staging memory"
    ]
    assert found["status"] == status
    if status != "ok":
        check(found, status, "6.00 kB of", "give a smaller --buffer-size or --num-buffers")


def test_memory_of_a_gpu_and_pinned(
    findings: Callable[..., Any], stub: Stub, two_gpus: dict[str, int]
) -> None:
    stub.device = "cuda"
    found = findings("--to", stub.url, "--device", "cuda:1", "--buffer-size", "90GiB")
    check(found["staging memory"], "fail", "193 GB of 149 GB that are free on cuda:1", "small")
    ring = max(RING_SIZE, (DEFAULT_THREADS + 1) * SLOT_SIZE)
    assert found["pinned memory"]["text"].startswith(f"{format_size(ring)} of ")


def test_the_memory_that_is_left_is_found() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < here.free_host_memory() <= total
