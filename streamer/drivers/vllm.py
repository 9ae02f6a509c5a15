"""vLLM's control plane, 0.30 and later, and that of our reference server.

The routes need ``VLLM_SERVER_DEV_MODE=1``; bodies are strict, an unknown key is a 500. What a
failed update does to a server, and so the order of the calls here, was seen on real servers:
docs/protocol.md.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streamer.drivers.base import JoinInfo, ServerInfo
from streamer.drivers.http import HttpClient
from streamer.exceptions import (
    DeadlineExceeded,
    IncompatibleServer,
    PlanError,
    ServerError,
    ServerRefused,
)
from streamer.plan import Call, Plan
from streamer.timeouts import Clock

OLDEST = (0, 30)
INCOMPLETE = "streamer-incomplete:"
"""A server whose weight version starts so holds, or may hold, a mixture of weights."""

BACKENDS = ("auto", "nccl", "streamer")
PAUSE_MODES = ("keep", "wait", "abort", "none")
PER_TENSOR_DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
    }
)
"""What the map of vLLM's own engine knows, which broadcasts a tensor in its own dtype."""

_CLEAN_UP_SECONDS = 5.0
_START_SO = (
    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
)


class VllmDriver:
    """One vLLM server. ``backend`` is asked of the server unless it is given."""

    def __init__(
        self,
        client: HttpClient,
        *,
        clock: Clock,
        pause: str = "keep",
        backend: str = "auto",
    ) -> None:
        self.url = client.url
        self._http = client
        self._clock = clock
        self._pause = pause
        self._backend = backend
        self._info: ServerInfo | None = None
        self._version: str | None = None
        self._target = ""
        self._paused_before = False
        self._began: list[str] = []
        self._finished = False

    def probe(self) -> ServerInfo:
        version = str(self._get("/version").get("version", ""))
        numbers = _numbers(version)
        if not numbers:
            raise IncompatibleServer(f"{self.url}: /version names no version, but {version!r}")
        if numbers < OLDEST:
            raise IncompatibleServer(
                f"{self.url} runs vLLM {version}; streamer speaks the protocol of "
                f"{OLDEST[0]}.{OLDEST[1]} and later: upgrade the server"
            )
        world_size = self._needs_dev_mode("/get_world_size").get("world_size")
        if type(world_size) is not int or world_size < 1:
            raise IncompatibleServer(
                f"{self.url}: /get_world_size answered {world_size!r}, not a count of workers"
            )
        backend, device = self._engine()
        self._info = ServerInfo(self.url, version, world_size, backend, device)
        self._version = self._weight_version()
        return self._info

    def _engine(self) -> tuple[str, str]:
        info = self._needs_dev_mode("/server_info?config_format=json")
        config = _object(info, "vllm_config")
        backend = _object(config, "weight_transfer_config").get("backend")
        device = str(_object(config, "device_config").get("device", "cuda")).partition(":")[0]
        if self._backend != "auto":
            backend = self._backend
        if backend is None:
            raise IncompatibleServer(
                f"{self.url} was started without a weight-transfer backend: {_START_SO}"
            )
        if backend not in ("nccl", "streamer"):
            raise IncompatibleServer(
                f"{self.url} receives with the backend {backend!r}; streamer speaks to nccl "
                "(vLLM's own) and streamer: name one of them in --weight-transfer-config"
            )
        return str(backend), device

    @property
    def info(self) -> ServerInfo:
        """What `probe` learned."""
        assert self._info is not None, "probe() comes first"
        return self._info

    def check(self, plan: Plan) -> None:
        if plan.packed or self.info.backend != "nccl":
            return
        for chunk in plan.chunks:
            for spec in chunk.specs:
                if spec.dtype not in PER_TENSOR_DTYPES:
                    raise PlanError(
                        f"tensor {spec.name}: {self.url} cannot receive {spec.dtype_name} one "
                        "tensor at a time (vLLM's own engine); send packed, or use the streamer "
                        "backend"
                    )

    def is_ours(self) -> bool:
        return self._weight_version() == self._version

    def serves(self, weight_version: str) -> bool:
        return self._weight_version() == weight_version

    def join(self, info: JoinInfo) -> None:
        self._http.post(
            "/init_weight_transfer_engine",
            {
                "init_info": {
                    **info.rendezvous,
                    "rank_offset": info.rank_offset,
                    "world_size": info.world_size,
                    "packed": info.packed,
                    "packed_buffer_size_bytes": info.buffer_size,
                    "packed_num_buffers": info.num_buffers,
                }
            },
            self._clock.connect,
        )

    def settle(self, workers: Sequence[Mapping[str, Any]]) -> None:
        if any(worker.get("update_open") for worker in workers):
            # Where only some have it open the others refuse; the last worker alone raises, so the
            # executor stays in step.
            with contextlib.suppress(ServerRefused):
                self._post("/finish_weight_update", {"weight_version": None})

    def begin(self, weight_version: str) -> None:
        self._http.close()  # a connection that the server is about to close as idle: never reused
        self._began, self._finished = [], False
        torn = self._torn
        # A server that a failed sync left paused is resumed by the sync that repairs it.
        self._paused_before = not torn and self._get("/is_paused").get("is_paused") is True
        if self._pause != "none":
            self._began.append("pause")
            self._post(f"/pause?mode={self._pause}")
        self._began.append("mark")
        self._post("/update_weight_version", {"new_version": INCOMPLETE + weight_version})
        if torn and self.info.backend == "nccl":
            self._restore()
        self._began.append("start")
        self._post("/start_weight_update")
        self._target = weight_version

    @property
    def _torn(self) -> bool:
        """Whether the server holds a mixture: its last sync, ours or another's, has failed."""
        return (self._version or "").startswith(INCOMPLETE)

    def _restore(self) -> None:
        """Put the layers of a failed update back in place, so that a new one can be opened.

        Seen on 0.32: after a failed update a plain start, update, finish fails as well, until a
        start and a finish with nothing loaded have been through. Our own engine does this itself.
        """
        try:
            self._post("/start_weight_update")
        except ServerRefused as error:
            if self.info.world_size > 1:
                raise IncompatibleServer(
                    f"{self.url} did not recover from its last failed update: restart it "
                    f"(with several workers, only the streamer backend survives one): {error}"
                ) from error
            # The last trainer died between start and update: that update is still open.
        self._post("/finish_weight_update", {"weight_version": None})

    def update(self, call: Call) -> None:
        specs = call.wire_specs()
        info: dict[str, Any] = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype_name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        if self.info.backend == "streamer":
            info["chunk_sizes"] = [chunk.nbytes for chunk in call.chunks]
        self._http.post("/update_weights", {"update_info": info}, None)

    def commit(self, weight_version: str) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})
        self._version, self._finished = weight_version, True
        # Requests that were kept hold keys and values of the old weights: they are computed anew.
        self._post("/reset_prefix_cache?reset_running_requests=true")
        if self._pause != "none" and not self._paused_before:
            self._post("/resume")

    def release(self) -> None:
        steps, self._began = self._began, []
        if "start" in steps:
            # Nothing was loaded: vLLM puts the old weights back exactly. If the start itself was
            # refused no update is open, and this is refused as well.
            with contextlib.suppress(ServerRefused):
                self._clean_up("/finish_weight_update", {"weight_version": None})
        if "mark" in steps and self._version is not None:
            self._clean_up("/update_weight_version", {"new_version": self._version})
        if "pause" in steps and not self._paused_before and not self._torn:
            self._clean_up("/resume")

    def abandon(self) -> str:
        if self._finished:
            return "holds the new weights, but may still be paused: POST /resume to it"
        self._version = INCOMPLETE + self._target
        try:
            self._clean_up("/finish_weight_update", {"weight_version": None})
        except ServerRefused:
            pass  # the failed call has closed the update already
        except (ServerError, DeadlineExceeded) as error:
            return f"holds a mixture of weights and does not answer ({error}): restart it"
        if self.info.backend == "nccl" and self.info.world_size > 1:
            return (
                "holds a mixture of old and new weights, and its workers may be out of step: "
                "restart it (the streamer backend survives this)"
            )
        return (
            "holds a mixture of old and new weights, is marked incomplete and left paused: "
            "push again"
        )

    def leave(self) -> None:
        if _numbers(self.info.version) >= (0, 32):
            self._clean_up("/shutdown_weight_transfer_engine")

    def cancel(self) -> None:
        self._http.cancel()

    def close(self) -> None:
        self._http.close()

    def _weight_version(self) -> str | None:
        value = self._get("/weight_info").get("weight_version")
        return None if value is None else str(value)

    def _get(self, path: str) -> dict[str, Any]:
        return self._http.get(path, self._clock.progress)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._http.post(path, body, self._clock.progress)

    def _clean_up(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._http.post(path, body, _CLEAN_UP_SECONDS)

    def _needs_dev_mode(self, path: str) -> dict[str, Any]:
        try:
            return self._get(path)
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise IncompatibleServer(
                f"{self.url} has no {path.partition('?')[0]} (404): {_START_SO}"
            ) from error


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at ``key``, or an empty one: the text of /server_info is not to be trusted."""
    item = value.get(key)
    return item if isinstance(item, dict) else {}


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
