"""What a vLLM server says of itself, and whether streamer can work with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from streamer.drivers.base import ServerInfo
from streamer.exceptions import IncompatibleServer

OLDEST = (0, 30)
START_SO = (
    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
)


def ask(get: Callable[[str], dict[str, Any]], url: str, backend: str) -> ServerInfo:
    """Ask the server at ``url``; a ``backend`` that is not ``auto`` is taken as given."""
    version = str(get("/version").get("version", ""))
    numbers = version_numbers(version)
    if not numbers:
        raise IncompatibleServer(f"{url}: /version names no version, but {version!r}")
    if numbers < OLDEST:
        raise IncompatibleServer(
            f"{url} runs vLLM {version}; streamer speaks the protocol of "
            f"{OLDEST[0]}.{OLDEST[1]} and later: upgrade the server"
        )
    world_size = get("/get_world_size").get("world_size")
    if type(world_size) is not int or world_size < 1:
        raise IncompatibleServer(
            f"{url}: /get_world_size answered {world_size!r}, not a count of workers"
        )
    config = _object(get("/server_info?config_format=json"), "vllm_config")
    engine = _object(config, "weight_transfer_config").get("backend")
    device = str(_object(config, "device_config").get("device", "cuda")).partition(":")[0]
    if backend != "auto":
        engine = backend
    if engine is None:
        raise IncompatibleServer(f"{url} was started without a weight-transfer backend: {START_SO}")
    if engine not in ("nccl", "streamer"):
        raise IncompatibleServer(
            f"{url} receives with the backend {engine!r}; streamer speaks to nccl (vLLM's own) and "
            "streamer: name one of them in --weight-transfer-config"
        )
    return ServerInfo(url, version, world_size, str(engine), device)


def version_numbers(version: str) -> tuple[int, ...]:
    """Major and minor of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at ``key``, or an empty one: the text of /server_info is not to be trusted."""
    item = value.get(key)
    return item if isinstance(item, dict) else {}
