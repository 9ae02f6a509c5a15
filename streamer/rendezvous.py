"""What workers join: the transport that suits them, and the store where ours meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamer import descriptors
from streamer.drivers.base import ServerInfo
from streamer.exceptions import IncompatibleServer, TransportError
from streamer.gpus import refuse_own_gpu
from streamer.network import address_towards, check_address
from streamer.options import Options
from streamer.transport.base import Transport
from streamer.transport.gloo import GlooTransport
from streamer.transport.lifeline import Lifeline
from streamer.transport.nccl import NcclTransport


def make_transport(
    servers: Sequence[ServerInfo], options: Options
) -> tuple[Transport, Lifeline | None]:
    """Rank 0 of a group over all workers of ``servers``, not connected yet, and its lifeline.

    There is one if the workers are of our own engine. The caller closes both, the transport first.
    Raises `StreamerError` if these servers cannot be one group, or not be reached from here; then
    nothing is left open.
    """
    refuse_mixed(servers)
    workers = sum(server.world_size for server in servers)
    device = torch.device("cpu")
    if servers[0].device != "cpu":
        device = sending_device(options)
        refuse_own_gpu(servers, device)
    lifeline = None
    if servers[0].backend == "streamer":
        lifeline = _host_lifeline(servers, options, workers)
    try:
        if device.type != "cpu":
            return NcclTransport(device, 0, 1 + workers, lifeline=lifeline), lifeline
        if lifeline is None:
            raise IncompatibleServer(
                f"{servers[0].url}: vLLM's own nccl engine cannot receive on a CPU; install "
                "streamer beside vLLM and start it with --weight-transfer-config "
                '\'{"backend": "streamer"}\''
            )
        return GlooTransport(lifeline, 0, 1 + workers), lifeline
    except BaseException:
        if lifeline is not None:
            lifeline.close()
        raise


def refuse_mixed(servers: Sequence[ServerInfo]) -> None:
    """Raise `IncompatibleServer` if no one broadcast can reach all ``servers``."""
    if len({(server.backend, server.device) for server in servers}) > 1:
        kinds = "; ".join(
            f"{server.url}: {server.backend} on {server.device}" for server in servers
        )
        raise IncompatibleServer(
            f"servers of one group must have one backend and one kind of device ({kinds}): "
            "push to them separately"
        )


def sending_device(options: Options) -> torch.device:
    """The CUDA device that a push to workers on GPUs sends from.

    Raises `TransportError` if none is given and there is none.
    """
    if options.device is not None:
        return options.device
    if not torch.cuda.is_available():
        raise TransportError(
            "the servers' workers are on GPUs, and torch sees no CUDA device here: NCCL needs one "
            "on the trainer's side too"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _host_lifeline(servers: Sequence[ServerInfo], options: Options, workers: int) -> Lifeline:
    urls = [server.url for server in servers if server.towards is None]
    known = [server.towards for server in servers if server.towards is not None]
    need = descriptors.of_group(workers, len(servers))
    descriptors.check_room(need, f"a group of {workers} workers")
    if options.address is not None:
        check_address(options.address, urls)
    address = options.address or address_towards(urls, known)
    return Lifeline.host(address, options.port)
