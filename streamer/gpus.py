"""Whether a server's workers are on the GPU that sends: NCCL takes one rank a GPU.

No server names its GPUs, so this is told from what it was started with: its world size, its
``CUDA_VISIBLE_DEVICES``, and that it is on this host. In a container these numbers may mean other
GPUs, so somebody else's memory must be in use here as well. What is missed NCCL finds itself, but
only once the servers have been asked to join. With ``NCCL_HOSTID`` set NCCL alone decides: ranks
whose ids differ may share a GPU, at the speed of the loopback network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from streamer.drivers.base import ServerInfo
from streamer.drivers.vllm_info import visible_gpus
from streamer.exceptions import IncompatibleServer
from streamer.network import is_here

_SOMEBODY = 2 << 30
"""Bytes in use on a GPU that are more than a context of our own and its libraries take."""
_REMEDY = (
    "and NCCL takes one rank a GPU: send from another with device (--device cuda:1), or start the "
    "server on another"
)


def refuse_own_gpu(servers: Sequence[ServerInfo], device: torch.device) -> None:
    """Raise `IncompatibleServer` if a worker is on ``device``, which would be two ranks there."""
    if "NCCL_HOSTID" in os.environ:
        return
    for server in servers:
        if not server.gpus or not is_here(urlsplit(server.url).hostname or ""):
            continue
        names = names_of(device)
        shared = [gpu for gpu in server.gpus if any(_same(gpu, name) for name in names)]
        if shared and in_use_by_others(device):
            raise IncompatibleServer(
                f"{server.url}: a worker is on the GPU that sends, {device} (number {shared[0]} "
                f"there), {_REMEDY}"
            )


def refuse_if_nccl_says_so(error: BaseException, device: torch.device) -> None:
    """Raise `IncompatibleServer` if ``error`` is NCCL's word for two ranks on one GPU."""
    said: BaseException | None = error
    while said is not None:
        if "Duplicate GPU" in str(said):
            raise IncompatibleServer(
                f"a worker of a server is on the GPU that sends, {device}, {_REMEDY}"
            ) from error
        said = said.__cause__ or said.__context__


def names_of(device: torch.device) -> list[str]:
    """What ``device`` is called in ``CUDA_VISIBLE_DEVICES``: its number, or its UUID."""
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    uuid = torch.cuda.get_device_properties(device).uuid
    return [visible[device.index], f"GPU-{uuid}"]


def in_use_by_others(device: torch.device) -> bool:
    """Whether another process has taken memory of ``device``, as every server does."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > _SOMEBODY


def _same(gpu: str, name: str) -> bool:
    """A UUID may be cut short, a number not."""
    return name == gpu or (gpu.startswith("GPU-") and name.startswith(gpu))
