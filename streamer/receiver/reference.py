"""The reference server: vLLM's control routes over worker processes that keep tensors by name.

It shows that weights arrive, without a GPU, a model or vLLM, and is what the tests and
``streamer demo`` push to. Needs the extra ``streamer[serve]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamer.receiver import OCCUPIED
from streamer.receiver.worker_process import Refused, WorkerProcess

PROTOCOL = "0.33.0"
"""The vLLM release whose routes these are."""

PAUSE_MODES = ("keep", "wait", "abort")


class ReferenceServer:
    """The state behind the routes."""

    def __init__(self, workers: int, device: str, discard: bool) -> None:
        self._count = workers
        self._device = device
        self._discard = discard
        self._instance = secrets.token_hex(8)
        self.workers: list[WorkerProcess] = []
        self._updating = False
        self._paused = False
        self._weight_version = "default"

    def app(self) -> Starlette:
        """The ASGI application; its workers live as long as its lifespan."""
        get: dict[str, Callable[[Request], Awaitable[dict[str, Any]]]] = {
            "/version": self.get_version,
            "/get_world_size": self.get_world_size,
            "/server_info": self.server_info,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
        }
        post: dict[str, Callable[[Request], Awaitable[dict[str, Any]]]] = {
            "/init_weight_transfer_engine": self.init,
            "/shutdown_weight_transfer_engine": self.shutdown,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/update_weight_version": self.update_weight_version,
            "/weight_checker": self.weight_checker,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset_prefix_cache,
        }
        routes = [Route("/health", self.health)]
        routes += [Route(path, _endpoint(call), methods=["GET"]) for path, call in get.items()]
        routes += [Route(path, _endpoint(call), methods=["POST"]) for path, call in post.items()]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            for number in range(self._count):
                device = f"cuda:{number}" if self._device == "cuda" else self._device
                self.workers.append(await WorkerProcess.start(number, device, self._discard))
            yield
        finally:
            await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def call(self, command: str, *arguments: Any) -> list[Any]:
        """Run ``command`` in every worker; the first error is raised at once.

        The others are not waited for: they may be stuck until the trainer, which this error
        reaches, leaves them.
        """
        tasks = [asyncio.ensure_future(worker.call(command, *arguments)) for worker in self.workers]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.add_done_callback(lambda task: task.exception())
        errors = [error for task in tasks if task in done and (error := task.exception())]
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]

    async def health(self, _: Request) -> Response:
        dead = [worker.number for worker in self.workers if worker.process.returncode is not None]
        return Response(status_code=503 if dead else 200)

    async def get_version(self, _: Request) -> dict[str, Any]:
        return {"version": f"{PROTOCOL}+streamer.{version('streamer')}"}

    async def get_world_size(self, _: Request) -> dict[str, Any]:
        return {"world_size": self._count}

    async def server_info(self, _: Request) -> dict[str, Any]:
        config = {
            "weight_transfer_config": {"backend": "streamer"},
            "device_config": {"device": self._device},
            "instance_id": self._instance,
        }
        shown = [
            f"{name}={value}"
            for name, value in os.environ.items()
            if name.startswith("NCCL_") or name == "CUDA_VISIBLE_DEVICES"
        ]
        system = {"torch_version": version("torch"), "env_vars": "\n".join(shown)}
        return {"vllm_config": config, "vllm_env": {}, "system_env": system}

    async def is_paused(self, _: Request) -> dict[str, Any]:
        return {"is_paused": self._paused}

    async def weight_info(self, _: Request) -> dict[str, Any]:
        return {"weight_version": self._weight_version}

    async def init(self, request: Request) -> dict[str, Any]:
        init_info = await _field(request, "init_info", dict)
        if self._updating and any(await self.call("is_syncing")):
            raise Refused(OCCUPIED)
        self._updating = False
        await self.call("init", init_info)
        return {"message": "Weight transfer initialized"}

    async def shutdown(self, _: Request) -> dict[str, Any]:
        if self._updating:
            raise Refused("Cannot release a trainer connection during a weight update")
        await self.call("shutdown")
        return {"message": "Weight transfer shut down"}

    async def start(self, _: Request) -> dict[str, Any]:
        if self._updating:
            raise Refused("a weight update is active already: call finish_weight_update first")
        self._updating = True
        return {"message": "Weight update started"}

    async def update(self, request: Request) -> dict[str, Any]:
        update_info = await _field(request, "update_info", dict)
        if not self._updating:
            raise Refused("start_weight_update must be called before update_weights")
        try:
            await self.call("update", update_info)
        except BaseException:
            self._updating = False
            raise
        return {"message": "Weights updated"}

    async def finish(self, request: Request) -> dict[str, Any]:
        weight_version = await _field(request, "weight_version", str | None, optional=True)
        if not self._updating:
            raise Refused("finish_weight_update called without start_weight_update")
        self._updating = False
        if weight_version is not None:
            self._weight_version = weight_version
        return {"message": "Weight update finished"}

    async def update_weight_version(self, request: Request) -> dict[str, Any]:
        self._weight_version = await _field(request, "new_version", str)
        return {"success": True, "new_version": self._weight_version}

    async def weight_checker(self, request: Request) -> dict[str, Any]:
        action = await _field(request, "action", str)
        if action != "checksum":
            raise Refused(f"action {action!r} is not supported here, only 'checksum'", 400)
        each = await self.call("checksum")
        return {
            "checksums": {
                f"{number}:{name}": digest
                for number, checksums in enumerate(each)
                for name, digest in checksums.items()
            }
        }

    async def pause(self, request: Request) -> dict[str, Any]:
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise Refused(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}", 400)
        self._paused = True
        return {"status": "paused"}

    async def resume(self, _: Request) -> dict[str, Any]:
        self._paused = False
        return {"status": "resumed"}

    async def reset_prefix_cache(self, _: Request) -> dict[str, Any]:
        return {"success": True}


def _endpoint(
    call: Callable[[Request], Awaitable[dict[str, Any]]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await call(request))
        except Refused as error:
            content = {"error": {"message": str(error), "code": error.status}}
            return JSONResponse(content, status_code=error.status)

    return answer


async def _field(request: Request, name: str, kind: Any, *, optional: bool = False) -> Any:
    """The one field of a strict JSON body."""
    body = await request.body()
    try:
        value = json.loads(body) if body or not optional else {}
    except ValueError:
        raise Refused("the body is not JSON", 400) from None
    except RecursionError:
        raise Refused("the body is nested too deeply", 400) from None
    if not isinstance(value, dict) or set(value) - {name} or (not optional and name not in value):
        raise Refused(f"the body must be an object with {name!r} alone", 400)
    field = value.get(name)
    if not isinstance(field, kind):
        raise Refused(f"{name!r} must be a {getattr(kind, '__name__', kind)}", 400)
    if isinstance(field, str) and not _is_unicode(field):
        raise Refused(f"{name!r} holds half a surrogate pair", 400)
    return field


def _is_unicode(text: str) -> bool:
    """Whether ``text`` can be put into an answer; JSON may escape what is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
