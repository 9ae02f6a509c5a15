"""A vLLM server that is none, and syncs into it."""

from __future__ import annotations

import re
import time

import pytest
import torch

from streamer import ServerRefused, TensorSpec, make_plan
from streamer.drivers.mark import INCOMPLETE
from streamer.verify import Sent

SPECS = [TensorSpec("w", torch.bfloat16, (2, 3)), TensorSpec("scale", torch.float32, ())]
START_WITH = "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
MARK = f"{INCOMPLETE}v2"
"""Without what tells it from the mark of another sync to the same version; so below."""
PAUSE = "/pause?mode=keep"
RESET = "/reset_prefix_cache?reset_running_requests=true"


SENT = Sent((), ("digest",))
"""What `commit` is given where the arrival has to be proven."""


class FakeVllm:
    """A server that keeps vLLM's state, refuses what vLLM refuses, and fails where it is told."""

    def __init__(self, fake, reply):
        self.fake, self.reply = fake, reply
        self.version, self.world_size = "0.33.0", 1
        self.backend, self.device = "nccl", "cuda"
        self.weight_version: str | None = "default"
        self.paused = self.updating = False
        self.received = 0
        self.failing: dict[str, tuple[int, object]] = {}
        self.late: tuple[str, float, bool] | None = None
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
            "/weight_checker",
        ):
            fake.routes[f"POST {path}"] = lambda handler, path=path: self.answer(handler, path)

    def fail(self, path, status=500, content="made to fail", times=1):
        self.failing[path] = (status, content, times)

    def delay(self, path, seconds, first=False):
        """The next call of ``path`` is answered late; ``first``: and carried out late."""
        self.late = (path, seconds, first)

    def answer(self, handler, path):
        if self.late and self.late[0] in ("/", path):
            _, seconds, first = self.late
            if self.late[0] != "/":
                self.late = None
            if first:
                time.sleep(seconds)
            self.answer_now(handler, path, 0 if first else seconds)
        else:
            self.answer_now(handler, path, 0)

    def answer_now(self, handler, path, delay):
        status, content, times = self.failing.get(path, (0, None, 0))
        if times:
            self.failing[path] = (status, content, times - 1)
            return self.reply(content, status, delay=delay)(handler)
        body = handler.call.body
        try:
            content = getattr(self, "do" + path.replace("/", "_"))(body)
        except RuntimeError as error:
            return self.reply({"error": {"message": str(error)}}, 500, delay=delay)(handler)
        return self.reply(content, delay=delay)(handler)

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

    def do_weight_checker(self, body):
        return {"checksums": {"w": str(self.received)}}

    def do_update_weight_version(self, body):
        self.weight_version = body["new_version"]
        return {"success": True}

    def do_start_weight_update(self, body):
        if self.updating:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.updating = True
        return {}

    def do_update_weights(self, body):
        if not self.updating:
            raise RuntimeError("start first")
        self.received += 1
        return {}

    def do_finish_weight_update(self, body):
        if not self.updating:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.updating = False
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
        return {}

    @property
    def serves(self):
        """What a user sees: the weights' name, whether it is paused, whether an update is open."""
        return without_token(self.weight_version), self.paused, self.updating


def call_of(packed=True, specs=SPECS):
    (call,) = make_plan(specs, packed=packed).calls
    return call


def commit_fails(one, vllm, path, text="no"):
    """A sync of ``one`` that goes well until its commit calls ``path``."""
    one.begin("v2")
    one.update(call_of())
    vllm.fail(path, 500, text)
    with pytest.raises(ServerRefused, match=f"{path}: 500 {text}"):
        one.commit("v2")


def update_fails(one, vllm):
    """A sync of ``one`` to v2 that fails when bytes have flown, and is abandoned."""
    one.begin("v2")
    vllm.fail("/update_weights", 500, "no")
    with pytest.raises(ServerRefused):
        one.update(call_of())
    one.abandon()


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
            found.append(" ".join([call.path, *map(without_token, map(str, values))]))
    return found


def without_token(version):
    return version and re.sub(rf"^({INCOMPLETE}.*)#[0-9a-f]{{8}}$", r"\1", version)
