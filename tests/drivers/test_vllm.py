"""The order of calls to a vLLM server, and the way back from every failure."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from streamer import (
    DeadlineExceeded,
    IncompatibleServer,
    PlanError,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    TensorSpec,
    Timeouts,
    make_plan,
)
from streamer.drivers import vllm as module
from streamer.drivers.base import JoinInfo
from streamer.drivers.http import HttpClient
from streamer.drivers.mark import INCOMPLETE
from streamer.drivers.vllm import PER_TENSOR_DTYPES, VllmDriver
from streamer.timeouts import Clock

pytestmark = pytest.mark.timeout(60)

SPECS = [TensorSpec("w", torch.bfloat16, (2, 3)), TensorSpec("scale", torch.float32, ())]
START_WITH = "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"


class FakeVllm:
    """A server that keeps vLLM's state, refuses what vLLM refuses, and fails where it is told."""

    def __init__(self, fake, reply):
        self.fake, self.reply = fake, reply
        self.version, self.world_size = "0.33.0", 1
        self.backend, self.device = "nccl", "cuda"
        self.weight_version: str | None = "default"
        self.paused = self.updating = False
        self.failing: dict[str, tuple[int, object]] = {}
        for path in ("/version", "/get_world_size", "/server_info", "/is_paused", "/weight_info"):
            fake.routes[f"GET {path}"] = lambda handler, path=path: self.answer(handler, path)
        for path in (
            "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/update_weight_version",
            "/pause",
            "/resume",
            "/reset_prefix_cache",
        ):
            fake.routes[f"POST {path}"] = lambda handler, path=path: self.answer(handler, path)

    def fail(self, path, status=500, content="made to fail", times=1):
        self.failing[path] = (status, content, times)

    def answer(self, handler, path):
        status, content, times = self.failing.get(path, (0, None, 0))
        if times:
            self.failing[path] = (status, content, times - 1)
            return self.reply(content, status)(handler)
        body = handler.call.body
        try:
            content = getattr(self, "do" + path.replace("/", "_"))(body)
        except RuntimeError as error:
            return self.reply({"error": {"message": str(error)}}, 500)(handler)
        return self.reply(content)(handler)

    def do_version(self, body):
        return {"version": self.version}

    def do_get_world_size(self, body):
        return {"world_size": self.world_size}

    def do_server_info(self, body):
        transfer = None if self.backend is None else {"backend": self.backend}
        config = {"weight_transfer_config": transfer, "device_config": {"device": self.device}}
        return {"vllm_config": config, "system_env": {"SECRET": "from the environment"}}

    def do_is_paused(self, body):
        return {"is_paused": self.paused}

    def do_weight_info(self, body):
        return {"weight_version": self.weight_version}

    def do_init_weight_transfer_engine(self, body):
        return {"message": "joined"}

    def do_shutdown_weight_transfer_engine(self, body):
        return {"message": "left"}

    def do_pause(self, body):
        self.paused = True
        return {"status": "paused"}

    def do_resume(self, body):
        self.paused = False
        return {"status": "resumed"}

    def do_reset_prefix_cache(self, body):
        return {}

    def do_update_weight_version(self, body):
        self.weight_version = body["new_version"]
        return {"success": True}

    def do_start_weight_update(self, body):
        if self.updating:
            raise RuntimeError("a weight update is active")
        self.updating = True
        return {}

    def do_update_weights(self, body):
        if not self.updating:
            raise RuntimeError("start first")
        return {}

    def do_finish_weight_update(self, body):
        if not self.updating:
            raise RuntimeError("no update is active")
        self.updating = False
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
        return {}

    @property
    def serves(self):
        """What a user sees: the weights' name, whether it is paused, whether an update is open."""
        return self.weight_version, self.paused, self.updating


@pytest.fixture
def vllm(fake_server, reply):
    return FakeVllm(fake_server, reply)


@pytest.fixture
def driver(vllm):
    made: list[VllmDriver] = []

    def make(timeouts=None, probe=True, headers=None, **options):
        timeouts = timeouts or Timeouts(5, 5)
        client = HttpClient(vllm.fake.url, connect_timeout=timeouts.connect, headers=headers)
        made.append(VllmDriver(client, clock=Clock(timeouts), **options))
        if probe:
            made[-1].probe()
            vllm.fake.calls.clear()
        return made[-1]

    yield make
    for one in made:
        one.close()


def call_of(packed=True, specs=SPECS):
    (call,) = make_plan(specs, packed=packed).calls
    return call


MARK = f"{INCOMPLETE}v2"


def commit_fails(one, vllm, path, text="no"):
    """A sync of ``one`` that goes well until its commit calls ``path``."""
    one.begin("v2")
    one.update(call_of())
    vllm.fail(path, 500, text)
    with pytest.raises(ServerRefused, match=f"{path}: 500 {text}"):
        one.commit("v2")


def sync(one, version):
    """One that goes well."""
    one.begin(version)
    one.update(call_of())
    one.commit(version)


def steps(vllm):
    """The POSTs so far, with what matters of their bodies."""
    found = []
    for call in vllm.fake.calls:
        if call.method == "POST":
            body = call.body or {}
            values = [v for k, v in body.items() if k in ("new_version", "weight_version")]
            found.append(" ".join([call.path, *map(str, values)]))
    return found


PAUSE = "/pause?mode=keep"
RESET = "/reset_prefix_cache?reset_running_requests=true"


# A sync that goes well.


def test_the_order_of_calls(driver, vllm):
    """Between start and finish a request would kill the engine: pause first, resume last."""
    one = driver()
    one.begin("v2")
    assert vllm.serves == (MARK, True, True)
    one.update(call_of())
    one.update(call_of())
    one.commit("v2")
    assert steps(vllm) == [
        f"/update_weight_version {MARK}",
        PAUSE,
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update v2",
        RESET,
        "/resume",
    ]
    assert vllm.serves == ("v2", False, False)
    assert one.is_ours()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_the_mode_of_pausing(driver, vllm, mode):
    one = driver(pause=mode)
    one.begin("v2")
    assert steps(vllm)[1] == f"/pause?mode={mode}"


def test_a_push_again_asks_two_things_at_once(driver, vllm):
    one = driver()
    both = threading.Barrier(2, timeout=5)
    for route in ("GET /weight_info", "GET /is_paused"):

        def answer(handler, usual=vllm.fake.routes[route]):
            both.wait()
            usual(handler)

        vllm.fake.routes[route] = answer
    assert one.is_ours()
    one.begin("v2")
    assert vllm.fake.paths.count("GET /is_paused") == 1, "it was known already"


@pytest.mark.parametrize("before", [False, True])
def test_what_was_said_a_while_ago_is_asked_again(driver, vllm, monkeypatch, before):
    one = driver()
    vllm.paused = before
    assert one.is_ours()
    vllm.paused = not before  # by its user, while other servers were asked
    monkeypatch.setattr(module, "_FRESH", 0.0)
    one.begin("v2")
    one.update(call_of())
    one.commit("v2")
    assert vllm.paused is not before, "as its user had it"


def test_pausing_can_be_left_to_the_caller(driver, vllm):
    one = driver(pause="none")
    vllm.paused = True
    sync(one, "v2")
    assert not [step for step in steps(vllm) if "pause" in step or "resume" in step]
    assert vllm.paused


def test_a_server_that_was_paused_stays_paused(driver, vllm):
    vllm.paused = True
    one = driver()
    sync(one, "v2")
    assert "/resume" not in steps(vllm)
    assert vllm.serves == ("v2", True, False)


def test_the_body_of_an_update(driver, vllm):
    """Strict: an unknown key is a 500, so ``chunk_sizes`` goes to our own engine alone."""
    one = driver()
    one.begin("v2")
    one.update(call_of())
    assert vllm.fake.calls[-1].body == {
        "update_info": {
            "names": ["scale", "w"],
            "dtype_names": ["float32", "bfloat16"],
            "shapes": [[], [2, 3]],
        }
    }


@pytest.mark.parametrize(
    ("backend", "version", "reused"),
    [("nccl", "0.33.0", True), ("nccl", "0.32.1", False), ("streamer", "0.32.0", True)],
)
def test_metadata_that_the_workers_have_is_not_sent_again(driver, vllm, backend, version, reused):
    vllm.backend, vllm.version = backend, version
    one, call = driver(), call_of()

    def named():
        one.begin("v2")
        one.update(call)
        listed = vllm.fake.calls[-1].body["update_info"]
        one.commit("v2")
        assert ("chunk_sizes" in listed) == (backend == "streamer" and bool(listed["names"]))
        return bool(listed["names"])

    assert [named(), named()] == [True, not reused]
    vllm.fail("/update_weights")
    with pytest.raises(ServerRefused):
        named()
    one.abandon()
    assert named(), "nobody knows what a failed call has left behind"
    one.join(JoinInfo({}, 1, 2, True, 64, 2))
    assert named(), "a join begins anew"
    call = call_of()
    assert named(), "another call"


def test_our_engine_is_told_the_chunks(driver, vllm):
    vllm.backend, vllm.device = "streamer", "cpu"
    one = driver()
    one.begin("v2")
    one.update(call_of())
    assert vllm.fake.calls[-1].body["update_info"]["chunk_sizes"] == [16]


def test_the_body_of_a_join(driver, vllm):
    one = driver()
    one.join(
        JoinInfo(
            rendezvous={"nccl_unique_id_b64": "abc="},
            rank_offset=3,
            world_size=7,
            packed=True,
            buffer_size=64,
            num_buffers=2,
        )
    )
    assert vllm.fake.calls[-1].body == {
        "init_info": {
            "nccl_unique_id_b64": "abc=",
            "rank_offset": 3,
            "world_size": 7,
            "packed": True,
            "packed_buffer_size_bytes": 64,
            "packed_num_buffers": 2,
        }
    }


@pytest.mark.parametrize(("version", "expected"), [("0.31.2", 0), ("0.32.0", 1), ("1.0", 1)])
def test_leaving_where_the_server_can(driver, vllm, version, expected):
    vllm.version = version
    driver().leave()
    assert len(vllm.fake.posts) == expected


# Asking.


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


# A sync that fails before a byte was sent: the server goes on with its old weights.

BEGIN = ["/is_paused", "/pause", "/update_weight_version", "/start_weight_update"]


@pytest.mark.parametrize("paused", [False, True], ids=["serving", "paused"])
@pytest.mark.parametrize("path", [*BEGIN, None])
@pytest.mark.parametrize("status", [500, 404])
def test_release_undoes_a_begin_that_failed(driver, vllm, path, status, paused):
    vllm.paused = paused
    one = driver()
    if path is None:
        one.begin("v2")
    else:
        vllm.fail(path, status, "no")
        with pytest.raises(ServerError):
            one.begin("v2")
    one.release()
    assert vllm.serves == ("default", paused, False)
    sync(one, "v3")
    assert vllm.serves == ("v3", paused, False)


@pytest.mark.parametrize("path", BEGIN)
def test_release_undoes_what_took_effect_without_an_answer(driver, vllm, path, eventually):
    """The call was carried out, its answer came too late."""
    one = driver(Timeouts(5, 0.3))
    plain = vllm.reply
    late = [path]

    def slow(*args, **options):
        if late and vllm.fake.calls[-1].path.startswith(path):
            late.clear()
            return plain(*args, **options, delay=1)
        return plain(*args, **options)

    vllm.reply = slow
    with pytest.raises(DeadlineExceeded, match=path):
        one.begin("v2")
    one.release()
    eventually(lambda: vllm.serves == ("default", False, False))


def test_release_of_what_did_not_begin_does_nothing(driver, vllm):
    one = driver()
    one.release()
    assert vllm.fake.posts == []
    sync(one, "v2")
    one.release()
    assert vllm.serves == ("v2", False, False)


def test_release_goes_on_when_one_of_its_steps_fails(driver, vllm):
    """A server that cannot close the update can still be named and resumed; the error is told."""
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weight_version", 500, "no")
    with pytest.raises(ServerError, match="/update_weight_version"):
        one.release()
    assert not vllm.paused


# A sync that fails after bytes were sent.


def test_abandon_closes_the_update_and_leaves_the_server_paused_and_marked(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weights", 500, {"error": {"message": "shape mismatch"}})
    with pytest.raises(ServerRefused, match="/update_weights: 500 shape mismatch"):
        one.update(call_of())
    said = one.abandon()
    assert said == (
        "holds a mixture of old and new weights, is marked incomplete and left paused: push again"
    )
    assert vllm.serves == (MARK, True, False)
    assert one.is_ours()


@pytest.mark.parametrize(("status", "remedy"), [(503, "restart it"), (404, "push again")])
def test_abandon_a_server_that_has_lost_a_worker(driver, vllm, status, remedy):
    one = driver()
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    vllm.fake.routes["GET /health"] = vllm.reply("", status)
    assert one.abandon().endswith(f": {remedy}")


def test_abandon_where_the_server_has_closed_the_update_itself(driver, vllm):
    one = driver()
    one.begin("v2")
    vllm.updating = False
    assert "push again" in one.abandon()


def test_abandon_a_server_of_several_workers_with_vllm_s_engine(driver, vllm):
    """Its executor is out of step: only a restart helps."""
    vllm.world_size = 2
    one = driver()
    one.begin("v2")
    assert one.abandon() == (
        "holds a mixture of old and new weights, and its workers may be out of step: restart it "
        "(the streamer backend survives this)"
    )
    vllm.backend = "streamer"
    other = driver()
    other.begin("v3")
    assert "push again" in other.abandon()


@pytest.mark.parametrize("how", ["gone", "html"])
def test_abandon_a_server_that_does_not_answer(driver, vllm, how):
    one = driver()
    one.begin("v2")
    if how == "gone":
        vllm.fake.routes["POST /finish_weight_update"] = lambda handler: (
            setattr(handler, "close_connection", True),
            handler.connection.close(),
        )
    else:
        vllm.fail("/finish_weight_update", 200, "<html>")
    said = one.abandon()
    assert said.startswith("holds a mixture of weights and does not answer (POST ")
    assert said.endswith("): restart it")


LEFT = "holds the new weights, but is marked incomplete and left paused: push again"


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/resume"])
def test_abandon_after_the_finish(driver, vllm, path):
    """The mark tells the next trainer that it was a sync, and not the user, that has paused it."""
    one = driver()
    commit_fails(one, vllm, path)
    assert one.abandon() == LEFT
    assert vllm.serves == (MARK, True, False)
    assert one.is_ours()
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", False, False)


def test_abandon_after_a_resume_that_was_done(driver, vllm):
    """Only its answer was lost."""
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.paused = False
    assert one.abandon() == "holds the new weights, and answers with them"
    assert vllm.serves == ("v2", False, False)


@pytest.mark.parametrize("path", ["/is_paused", "/update_weight_version"])
def test_abandon_after_the_finish_where_it_cannot_be_marked(driver, vllm, path):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.fail(path, 500, "no")
    assert one.abandon() == "holds the new weights, but may still be paused: POST /resume to it"
    assert vllm.serves == ("v2", True, False)


@pytest.mark.parametrize("held", [False, True], ids=["ours", "its user's"])
def test_a_failed_reset_does_not_resume_what_its_user_had_paused(driver, vllm, held):
    vllm.paused = held
    one = driver()
    commit_fails(one, vllm, "/reset_prefix_cache")
    assert one.abandon() == ("holds the new weights" if held else LEFT)
    other = driver()
    sync(other, "v3")
    assert vllm.serves == ("v3", held, False)


def test_what_another_trainer_has_taken_after_the_finish_is_not_marked(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/resume")
    vllm.weight_version = "v3"
    assert "another trainer" in one.abandon()
    assert vllm.weight_version == "v3"


def test_abandon_after_a_finish_that_failed(driver, vllm):
    one = driver()
    commit_fails(one, vllm, "/finish_weight_update", "missing parameters: lm_head")
    assert "holds a mixture" in one.abandon()
    assert vllm.serves == (MARK, True, False)


# Two trainers.


def test_a_server_that_another_trainer_has_taken_is_left_alone(driver, vllm):
    """Whoever wakes up late must not close, resume or unmark what is somebody else's by then."""
    late, other = driver(), driver()
    late.begin("v2")
    other.probe()
    other.begin("v3")
    vllm.fake.calls.clear()
    late.release()
    assert "another trainer" in late.abandon()
    late.leave()
    assert vllm.fake.posts == []
    assert vllm.serves == (f"{INCOMPLETE}v3", True, True)


def test_a_late_finish_does_not_commit_what_another_trainer_has_begun(driver, vllm):
    """A trainer that was suspended in mid-sync, and another that came meanwhile."""
    late, other = driver(), driver()
    late.begin("v2")
    late.update(call_of())
    other.probe()
    other.begin("v3")
    vllm.fake.calls.clear()
    with pytest.raises(ServerError, match=f"another trainer has pushed.*{INCOMPLETE}v3"):
        late.commit("v2")
    assert "another trainer" in late.abandon()
    assert vllm.fake.posts == []
    assert vllm.serves == (f"{INCOMPLETE}v3", True, True)


# The way back.


def torn(driver, vllm, **options):
    """A driver whose last sync has failed."""
    one = driver(**options)
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    one.abandon()
    vllm.fake.calls.clear()
    return one


@pytest.mark.parametrize("whose", ["ours", "another trainer's"])
def test_a_torn_server_is_restored_before_the_next_update(driver, vllm, whose):
    """A plain start after a failed update fails: first a start and a finish with nothing."""
    one = torn(driver, vllm)
    if whose != "ours":
        one = driver()
    sync(one, "v3")
    assert steps(vllm) == [
        f"/update_weight_version {INCOMPLETE}v3",
        PAUSE,
        "/start_weight_update",
        "/finish_weight_update None",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update v3",
        RESET,
        "/resume",
    ]
    assert vllm.serves == ("v3", False, False)


def test_our_engine_restores_itself(driver, vllm):
    vllm.backend = "streamer"
    one = torn(driver, vllm)
    one.begin("v3")
    assert steps(vllm) == [
        f"/update_weight_version {INCOMPLETE}v3",
        PAUSE,
        "/start_weight_update",
    ]


def test_an_update_that_a_dead_trainer_left_open_is_closed(driver, vllm):
    vllm.weight_version, vllm.paused, vllm.updating = MARK, True, True
    one = driver()
    sync(one, "v3")
    assert vllm.serves == ("v3", False, False)


def test_several_workers_that_do_not_recover_must_be_restarted(driver, vllm):
    vllm.world_size = 2
    one = torn(driver, vllm)
    vllm.fail("/start_weight_update", 500, "out of step")
    with pytest.raises(IncompatibleServer) as caught:
        one.begin("v3")
    assert "did not recover from its last failed update: restart it" in str(caught.value)
    assert "out of step" in str(caught.value)


@pytest.mark.parametrize("step", ["/pause", "/update_weight_version", "/start_weight_update",
                                  "/finish_weight_update"])  # fmt: skip
def test_release_of_a_torn_server_leaves_it_marked_and_paused(driver, vllm, step):
    """It holds a mixture: it must not serve."""
    one = torn(driver, vllm)
    vllm.fail(step, 500, "not now")
    with pytest.raises(ServerError) as caught:
        one.begin("v3")
    assert step in str(caught.value), "the first error is the one that tells"
    assert "not now" in str(caught.value)
    one.release()
    assert vllm.weight_version.startswith(INCOMPLETE)
    assert vllm.paused
    sync(one, "v4")
    assert vllm.serves == ("v4", False, False)


def test_a_server_that_its_user_had_paused_stays_paused_through_a_repair(driver, vllm):
    """The failed sync did not pause it; the one that repairs it must not resume it."""
    vllm.paused = True
    one = torn(driver, vllm)
    sync(one, "v3")
    assert vllm.serves == ("v3", True, False)


@pytest.mark.parametrize(
    ("workers", "closed"),
    [
        ([], False),
        ([{}], False),
        ([{"update_open": False}, {"update_open": False}], False),
        ([{"update_open": False}, {"update_open": True}], True),
    ],
)
def test_settling_goes_by_what_the_workers_said(driver, vllm, workers, closed):
    one = driver()
    vllm.updating = True
    one.settle(workers)
    assert vllm.updating is not closed
    assert steps(vllm) == (["/finish_weight_update None"] if closed else [])


def test_settling_may_be_refused(driver, vllm):
    driver().settle([{"update_open": True}])
    assert steps(vllm) == ["/finish_weight_update None"]


def test_is_ours_notices_another_server_or_trainer(driver, vllm):
    """Case 4."""
    one = driver()
    assert one.is_ours()
    sync(one, "v2")
    assert one.is_ours()
    vllm.weight_version = "default"
    assert not one.is_ours()


# Deadlines and cancelling.

EVERY = [
    ("/version", lambda one: one.probe()),
    ("/get_world_size", lambda one: one.probe()),
    ("/server_info", lambda one: one.probe()),
    ("/weight_info", lambda one: one.probe()),
    ("/is_paused", lambda one: one.begin("v2")),
    ("/pause", lambda one: one.begin("v2")),
    ("/update_weight_version", lambda one: one.begin("v2")),
    ("/start_weight_update", lambda one: one.begin("v2")),
    ("/finish_weight_update", lambda one: (one.begin("v2"), one.commit("v2"))),
    ("/reset_prefix_cache", lambda one: (one.begin("v2"), one.commit("v2"))),
    ("/resume", lambda one: (one.begin("v2"), one.commit("v2"))),
]


@pytest.mark.parametrize(("path", "use"), EVERY, ids=[path for path, _ in EVERY])
def test_one_setting_is_obeyed_by_every_endpoint(driver, vllm, path, use):
    """Case 5: a server that sleeps longer in any of them."""
    timeouts = Timeouts(connect=0.4, progress=0.4)
    one = driver(timeouts, probe=path in ("/version", "/get_world_size"))
    one.probe()
    plain = vllm.reply

    def slow(*args, **options):
        late = vllm.fake.calls[-1].path.partition("?")[0] == path
        return plain(*args, **options, delay=2 if late else 0)

    vllm.reply = slow
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        use(one)
    assert 0.3 < time.monotonic() - started < 5
    assert f"{vllm.fake.url}{path}: no answer after 0.4 s" in str(caught.value)


def test_an_update_has_no_deadline_of_its_own_and_can_be_cancelled(driver, vllm, eventually):
    """It lasts as long as the bytes flow: the broadcast watches the time."""
    one = driver(Timeouts(connect=0.4, progress=0.4))
    one.begin("v2")
    plain = vllm.reply
    vllm.reply = lambda *args, **options: plain(*args, **options, delay=30)
    errors = []

    def update():
        try:
            one.update(call_of())
        except ServerUnreachable as error:
            errors.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    eventually(lambda: "/update_weights" in vllm.fake.posts)
    time.sleep(0.8)
    assert thread.is_alive()
    started = time.monotonic()
    one.cancel()
    thread.join(10)
    assert time.monotonic() - started < 1
    assert "/update_weights: cancelled" in str(errors[0])
    assert vllm.fake.posts.count("/update_weights") == 1


def test_a_clean_up_has_a_short_deadline(driver, vllm, monkeypatch):
    monkeypatch.setattr(module, "_CLEAN_UP_SECONDS", 0.3)
    one = driver(Timeouts(60, 60))
    one.begin("v2")
    plain = vllm.reply
    vllm.reply = lambda *args, **options: plain(*args, **options, delay=5)
    started = time.monotonic()
    said = one.abandon()
    assert time.monotonic() - started < 3
    assert "does not answer" in said
