"""What the figures were measured on: hardware, versions, and the commit of streamer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch

import streamer

_GIT_SECONDS = 5.0


def describe_machine() -> dict[str, Any]:
    """JSON types: ``cpu``, ``cores``, ``memory`` in bytes, ``gpus``, ``load`` (of a minute)."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str | None]:
    """Of ``streamer`` and its ``commit``, and of what decides speed. None for what is not there."""
    cuda = torch.cuda.is_available()
    return {
        "streamer": version("streamer"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def commit() -> str | None:
    """The commit that streamer runs from, ``-dirty`` if files were changed; None if unknown."""
    folder = Path(streamer.__file__).parents[1]
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() or None
    try:
        origin = json.loads(distribution("streamer").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    found = origin.get("vcs_info", {}).get("commit_id")
    return found if isinstance(found, str) else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
