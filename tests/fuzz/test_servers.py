"""Whatever a server answers, only errors of ours come out, and soon."""

from __future__ import annotations

import contextlib
import json
import time
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer import Session, StreamerError, TensorSpec, Timeouts
from streamer.drivers.base import JoinInfo
from streamer.drivers.http import HttpClient, normalize_url
from streamer.drivers.routes import HttpRoutes
from streamer.drivers.secrets import hide_user
from streamer.drivers.vllm import VllmDriver
from streamer.plan import make_plan
from streamer.timeouts import Clock
from streamer.verify import Sent

pytestmark = pytest.mark.timeout(120)

FUZZ = settings(max_examples=150, deadline=None, database=None, derandomize=True)
SECONDS = 2.0

KEYS = st.sampled_from(
    ["version", "world_size", "vllm_config", "weight_transfer_config", "backend", "device_config",
     "device", "system_env", "env_vars", "pip_packages", "weight_version", "is_paused", "error",
     "message", "detail", "checksums", "success", "torch_version"]
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        [
            "0.33.0",
            "0.32.1",
            "9" * 5000,
            "nccl",
            "streamer",
            "cuda:0",
            "cpu",
            "NCCL_X=1",
            "0.33\x1b[31m",
            "0.1\x1b[31m\n",
        ]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner),
    max_leaves=8,
)
SOUND = {
    "/version": {"version": "0.33.0"},
    "/get_world_size": {"world_size": 2},
    "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
    "/weight_info": {"weight_version": "default"},
    "/is_paused": {"is_paused": False},
    "/weight_checker": {"checksums": {"0:a": "1"}},
}
PATHS = [
    *SOUND, "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/update_weight_version", "/pause", "/resume", "/reset_prefix_cache",
    "/shutdown_weight_transfer_engine",
]  # fmt: skip
BODIES = JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)
STATUSES = st.sampled_from([200, 200, 200, 100, 204, 206, 302, 307, 400, 401, 404, 500, 503, 599])
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Location", "Content-Encoding", "Retry-After", "Set-Cookie"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
    max_size=2,
)
ANSWERS = st.tuples(STATUSES, BODIES, HEADERS)


@contextlib.contextmanager
def ours_alone():
    """Nothing but a `StreamerError` of one line, within seconds."""
    started = time.monotonic()
    failure: StreamerError | None = None
    try:
        yield
    except StreamerError as error:
        failure = error
    assert failure is None or str(failure).isprintable()
    assert time.monotonic() - started < 3 * SECONDS


@pytest.fixture(scope="module")
def stub(fake_server_class):
    server = fake_server_class()
    yield server
    server.stop()


@FUZZ
@given(answers=st.dictionaries(st.sampled_from(PATHS), ANSWERS, max_size=3), verify=st.booleans())
def test_every_call_of_a_driver(stub, reply, answers, verify):
    """From the first question to the last resume; a few routes answer nonsense."""
    for path in PATHS:
        status, body, headers = answers.get(path, (200, json.dumps(SOUND.get(path, {})), None))
        for method in ("GET", "POST"):
            stub.routes[f"{method} {path}"] = reply(body, status, headers)
    named = ["default"]

    def name(handler):
        named.append(handler.call.body["new_version"])
        reply({})(handler)

    if not answers.keys() & {"/weight_info", "/update_weight_version"}:
        # Or no sync would come to its end.
        stub.routes["POST /update_weight_version"] = name
        stub.routes["GET /weight_info"] = lambda handler: reply({"weight_version": named[-1]})(
            handler
        )
    timeouts = Timeouts(connect=SECONDS, progress=SECONDS)
    routes = HttpRoutes(HttpClient(stub.url, connect_timeout=SECONDS))
    driver = VllmDriver(routes, clock=Clock(timeouts), verify=verify)
    plan = make_plan([TensorSpec("a", torch.float32, (2,))])
    info = JoinInfo({"nccl_unique_id_b64": "x"}, 1, 3, True, 1 << 20, 2)
    with ours_alone():
        driver.probe()
        steps = [
            driver.is_ours,
            lambda: driver.serves("v"),
            lambda: driver.check(plan),
            lambda: driver.join(info),
            lambda: driver.settle([{"update_open": True}]),
            lambda: driver.begin("v"),
            driver.release,
            lambda: driver.begin("v"),
            lambda: driver.update(plan.calls[0]),
            driver.abandon,
            lambda: driver.begin("v"),
            lambda: driver.commit("v", Sent(plan.calls, ("d",)) if verify else None),
            driver.abandon,
            driver.leave,
        ]
        for step in steps:
            with ours_alone():
                step()


@FUZZ
@given(answers=st.dictionaries(st.sampled_from(PATHS), ANSWERS, min_size=1, max_size=4))
def test_a_push(stub, reply, make_source, answers):
    """There are no workers: what does not fail before that fails at the join."""
    for path in PATHS:
        status, body, headers = answers.get(path, (200, json.dumps(SOUND.get(path, {})), None))
        for method in ("GET", "POST"):
            stub.routes[f"{method} {path}"] = reply(body, status, headers)
    source = make_source({"a": torch.zeros(2)})
    timeouts = Timeouts(connect=0.2, progress=SECONDS)
    with ours_alone(), Session(stub.url, timeouts=timeouts) as session:
        session.push(source, weight_version="v")


@FUZZ
@given(
    raw=st.binary(max_size=200)
    | st.tuples(st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 500\r\n", b"HTTP/9 x\r\n"]),
                st.binary(max_size=200)).map(b"".join)
    | st.tuples(st.integers(-5, 2**70), st.binary(max_size=20)).map(
        lambda pair: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % pair)
    | st.binary(max_size=60).map(
        lambda body: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
)  # fmt: skip
def test_bytes_that_are_no_http(stub, raw):
    def send(handler):
        handler.wfile.write(raw)
        handler.close_connection = True

    stub.routes["GET /version"] = stub.routes["POST /pause"] = send
    client = HttpClient(stub.url, connect_timeout=SECONDS)
    with ours_alone():
        client.get("/version", SECONDS)
    with ours_alone():
        client.post("/pause", {"a": 1}, SECONDS)


URLS = st.text(max_size=40) | st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["http://", "https://", "HTTP://", "//", "ftp://", "", "http:/", "http:"]),
    st.sampled_from(["", "u:p@", "@", ":@", "%zz:%41@", "é@"]) | st.text(max_size=5),
    st.sampled_from(["h", "127.0.0.1", "[::1]", "[", "[::1", "a..b", "xn--", "é.é", "h\0", "-"])
    | st.text(max_size=8),
    st.sampled_from(["", ":0", ":1", ":99999", ":x", ":-1", ":"]),
    st.sampled_from(["", "/", "/v1", "/a b", "/é", "/?q", "#f", "/\r\nX: y", "/%zz"]),
)


@settings(FUZZ, max_examples=400)
@given(url=URLS)
def test_server_urls(url):
    """Refused, or taken and put into one form; no password is shown."""
    with ours_alone():
        normal = normalize_url(url)
        assert normalize_url(normal) == normal
        assert urlsplit(hide_user(normal)).netloc.rpartition("@")[0] in ("", "…")
        client = HttpClient(url, connect_timeout=0.2)
        assert client.host
        assert 0 < client.port < 65536


@pytest.mark.parametrize(
    "url", ["http://a..b:1", "http://h\0:1", "http://127.0.0.1:1/a b", "http://é" + "é" * 70 + ":1",
            "http://127.0.0.1:1/é", "http://u:p@127.0.0.1:1/\x7f"]
)  # fmt: skip
def test_urls_that_no_connection_can_be_made_to(url):
    with ours_alone():
        HttpClient(url, connect_timeout=0.5).get("/version", 0.5)
