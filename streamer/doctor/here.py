"""Checks of this host: what it sends with, and whether workers find it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from streamer import descriptors
from streamer.doctor.finding import Finding, fail, ok, warn
from streamer.doctor.server import describe
from streamer.drivers.base import ServerInfo
from streamer.drivers.vllm_info import version_numbers
from streamer.exceptions import StreamerError
from streamer.gpus import refuse_own_gpu
from streamer.network import address_towards, check_address, is_here
from streamer.options import Options
from streamer.rendezvous import refuse_mixed, sending_device
from streamer.sizes import format_size
from streamer.transport import _libnccl
from streamer.transport.lifeline import Lifeline

_ADDRESS = "give the address of this host that the servers reach with --address, or none"


def settings() -> Finding:
    """Versions and settings that decide over NCCL."""
    found = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    nccl = _libnccl.version() if torch.cuda.is_available() else "not used without a GPU"
    return ok("settings here", describe(torch.__version__, nccl, found))


def one_group(servers: Sequence[ServerInfo]) -> Finding:
    """Whether one broadcast can reach all of them."""
    try:
        refuse_mixed(servers)
    except StreamerError as error:
        return fail("one group", str(error), "push to each kind alone")
    workers = sum(server.world_size for server in servers)
    return ok("one group", f"{workers} workers, {servers[0].backend} on {servers[0].device}")


def device(servers: Sequence[ServerInfo], options: Options) -> Iterator[Finding]:
    """Whether this host has a GPU to send from, and no worker is on it."""
    if servers[0].device != "cuda":
        yield ok("device", "CPU: the workers are on CPUs, and Gloo carries the bytes")
        return
    if not torch.cuda.is_available():
        yield fail(
            "device",
            "the workers are on GPUs, and torch sees none here",
            "run the trainer where there is a GPU, with a torch that is built for it",
        )
        return
    chosen = sending_device(options)
    yield ok("device", f"{chosen}, {torch.cuda.get_device_name(chosen)}")
    try:
        refuse_own_gpu(servers, chosen)
    except StreamerError as error:
        yield fail(
            "GPU of its own",
            str(error),
            "send from another with --device, or start the server on another",
        )
    else:
        yield ok("GPU of its own", "no worker was found on it")


def nccl_versions(there: str) -> Iterator[Finding]:
    """Whether both ends of NCCL are of one release, which it demands."""
    if not there or not torch.cuda.is_available():
        return
    here = _libnccl.version()
    if version_numbers(here) != version_numbers(there):
        yield warn(
            "NCCL versions",
            f"{here} here, and {there} is installed there: ranks of different releases may not "
            "connect",
            "install the same nvidia-nccl package on both sides",
        )
    else:
        yield ok("NCCL versions", f"{here} here, {there} there")


def open_files(servers: Sequence[ServerInfo]) -> Finding:
    """Whether this process may open as many files as a group of these servers takes."""
    workers = sum(server.world_size for server in servers)
    need = descriptors.of_group(workers, len(servers))
    try:
        descriptors.check_room(need, f"a group of {workers} workers")
    except StreamerError as error:
        return fail("open files", str(error), descriptors.REMEDY)
    return ok("open files", f"up to {need} more, which the limit allows")


def address(urls: Sequence[str], options: Options) -> Iterator[Finding]:
    """Whether workers of our own engine find this host, and the port that they look for."""
    try:
        if options.address is not None:
            check_address(options.address, urls)
        found = options.address or address_towards(urls)
    except StreamerError as error:
        yield fail("address", str(error), _ADDRESS)
        return
    if options.address is not None and not is_here(options.address):
        yield fail("address", f"{options.address} is no address of this host", _ADDRESS)
        return
    yield ok("address", f"{found}, {'as given' if options.address else 'found out'}")
    try:
        Lifeline.host(found, options.port).close()
    except StreamerError as error:
        yield fail("port", str(error), "give another --port, or 0")
    else:
        yield ok("port", str(options.port) if options.port else "a free one, each time")


def memory(name: str, need: int, free: int, what: str) -> Finding:
    """Whether ``need`` bytes are there."""
    text = f"{format_size(need)} of {format_size(free)} that are free {what}"
    smaller = "give a smaller --buffer-size or --num-buffers"
    if need > free:
        return fail(name, text, smaller)
    if need > 0.8 * free:
        return warn(name, text, smaller)
    return ok(name, text)


def free_host_memory() -> int:
    """Bytes that this process may still take: the machine's, or its cgroup's if that has less."""
    with open("/proc/meminfo") as file:
        values = dict(line.split(":", 1) for line in file)
    free = int(values["MemAvailable"].split()[0]) * 1024
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as file:
            limit = int(file.read())
        with open(f"{group}.current") as file:
            used = int(file.read())
        with open(f"{group}.stat") as file:
            cached = int(dict(line.split() for line in file)["inactive_file"])
    except (OSError, ValueError, KeyError):  # no cgroup of its own, or no limit: "max"
        return free
    return min(free, limit - used + cached)
