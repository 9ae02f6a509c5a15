"""What a vLLM server says of itself, and whether streamer can work with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from streamer.defaults import ENGINES
from streamer.drivers.base import ServerInfo
from streamer.exceptions import IncompatibleServer

OLDEST = (0, 30)
CONFIGURE_SO = (
    '--weight-transfer-config \'{"backend": "nccl"}\' (a server on CPUs: install streamer beside '
    'it, and \'{"backend": "streamer"}\')'
)
START_SO = f"start it with VLLM_SERVER_DEV_MODE=1 and {CONFIGURE_SO}"
MOST_WORKERS = 1 << 16
_LONGEST_NUMBER = 9
_LONGEST_TEXT = 60
SERVER_INFO = "/server_info?config_format=json"


def ask(get: Callable[[str], dict[str, Any]], url: str, backend: str) -> ServerInfo:
    """Ask the server at ``url``; a ``backend`` that is not ``auto`` is taken as given."""
    version = str(get("/version").get("version", ""))
    check_version(url, version)
    world_size = check_world_size(url, get("/get_world_size").get("world_size"))
    setup = Setup.parse(get(SERVER_INFO))
    engine = setup.backend if backend == "auto" else backend
    check_engine(url, engine)
    gpus = setup.gpus(world_size)
    return ServerInfo(url, version, world_size, str(engine), setup.device, gpus)


def check_version(url: str, version: str) -> None:
    """Raise `IncompatibleServer` for a version whose dialect we do not speak."""
    numbers = version_numbers(version)
    if not numbers:
        raise IncompatibleServer(f"{url}: /version names no version, but {shown(version)}")
    if numbers < OLDEST:
        raise IncompatibleServer(
            f"{url} runs vLLM {version:.60}; streamer speaks the protocol of "
            f"{OLDEST[0]}.{OLDEST[1]} and later: upgrade the server"
        )


def check_world_size(url: str, size: object) -> int:
    """``size``. Raises `IncompatibleServer` for what cannot be a count of workers."""
    if not is_world_size(size):
        raise IncompatibleServer(
            f"{url}: /get_world_size answered {shown(size)}, not a count of workers"
        )
    return size


def check_engine(url: str, engine: object) -> None:
    """Raise `IncompatibleServer` for an engine that we cannot send to."""
    if engine is None:
        raise IncompatibleServer(f"{url} was started without a weight-transfer backend: {START_SO}")
    if engine not in ENGINES:
        raise IncompatibleServer(
            f"{url} receives with the backend {shown(engine)}; streamer speaks to nccl (vLLM's "
            "own) and streamer: name one of them in --weight-transfer-config"
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What is useful in ``/server_info``, which also holds what must not be repeated.

    ``environment`` are its ``NCCL_*`` and ``CUDA_VISIBLE_DEVICES`` that are set, None if it does
    not tell; ``torch`` and ``nccl`` are versions, ``instance`` is what vLLM calls this engine and
    no other, all empty if it does not tell.
    """

    backend: object
    device: str
    environment: dict[str, str] | None
    torch: str
    nccl: str
    instance: str

    @classmethod
    def parse(cls, info: dict[str, Any]) -> Setup:
        """From its JSON, none of which can be relied on."""
        config, system = _object(info, "vllm_config"), _object(info, "system_env")
        backend = _object(config, "weight_transfer_config").get("backend")
        device = str(_object(config, "device_config").get("device", "cuda")).partition(":")[0]
        settings, packages = system.get("env_vars"), system.get("pip_packages")
        environment = None
        if isinstance(settings, str):
            environment = dict(
                re.findall(r"^(NCCL_\w+|CUDA_VISIBLE_DEVICES)=(.*)$", settings, re.MULTILINE)
            )
        nccl = re.search(r"^\S*nvidia-nccl-cu\d+=+(\S+)", str(packages), re.MULTILINE)
        return cls(
            backend,
            device,
            environment,
            str(system.get("torch_version") or ""),
            nccl[1] if nccl else "",
            str(config.get("instance_id") or ""),
        )

    def gpus(self, world_size: int) -> tuple[str, ...]:
        """See `ServerInfo`."""
        if self.device != "cuda" or self.environment is None:
            return ()
        return visible_gpus(self.environment.get("CUDA_VISIBLE_DEVICES"), world_size)


def visible_gpus(value: str | None, count: int) -> tuple[str, ...]:
    """The first ``count`` GPUs that a process with this ``CUDA_VISIBLE_DEVICES`` sees."""
    if value is None:
        return tuple(map(str, range(count)))
    return tuple(part.strip() for part in value.split(",") if part.strip())[:count]


def version_numbers(version: str) -> tuple[int, ...]:
    """Major and minor, with which a version begins; empty if it does not, or implausibly long."""
    found = re.match(r"v?(\d+)\.(\d+)", version, re.ASCII)
    parts = found.groups() if found else ()
    return () if any(len(part) > _LONGEST_NUMBER for part in parts) else tuple(map(int, parts))


def is_world_size(value: object) -> TypeGuard[int]:
    """Whether ``value`` can be a count of workers."""
    return type(value) is int and 1 <= value <= MOST_WORKERS


def shown(value: object) -> str:
    """What a server said instead of what it should have, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # Python turns no such number into text
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at ``key``, or an empty one: the text of /server_info is not to be trusted."""
    item = value.get(key)
    return item if isinstance(item, dict) else {}
