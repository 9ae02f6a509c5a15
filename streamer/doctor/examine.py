"""All checks, in the order in which a push would run into what they find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from streamer.doctor import here, weights
from streamer.doctor.finding import Finding, fail
from streamer.doctor.server import Server, each_once
from streamer.drivers.base import ServerInfo
from streamer.drivers.http import HttpClient
from streamer.drivers.routes import HttpRoutes
from streamer.drivers.vllm import VllmDriver
from streamer.exceptions import StreamerError
from streamer.options import Options
from streamer.source import WeightSource
from streamer.timeouts import Clock


def examine(
    to: Sequence[str],
    options: Options,
    source: AbstractContextManager[WeightSource] | None = None,
) -> Iterator[Finding]:
    """Everything that can be found out before a push of ``source`` to these servers.

    Nothing is changed on a server. Each question to one has the progress timeout of ``options``.
    Raises `UsageError` for a URL or a header that is none.
    """
    clock = Clock(options.timeouts)
    clients = [
        HttpClient(
            url,
            connect_timeout=options.timeouts.connect,
            headers=options.headers,
            ca_bundle=options.ca_bundle,
            trust_env=options.trust_env,
        )
        for url in to
    ]
    drivers: list[VllmDriver] = []
    servers: list[ServerInfo] = []
    fit: list[Server] = []
    nccl = ""
    for client in clients:
        server = Server(client, options, clock.progress)
        failed = False
        for found in server.examine():
            failed = failed or found.status == "fail"
            yield replace(found, server=server.url)
        if failed:
            continue
        driver = VllmDriver(
            HttpRoutes(client), clock=clock, backend=options.backend, verify=options.verify
        )
        try:
            servers.append(driver.probe())
        except StreamerError as error:
            yield replace(fail("probe", str(error), "try again"), server=server.url)
            continue
        drivers.append(driver)
        fit.append(server)
        nccl = nccl or server.setup.nccl
    if len(fit) > 1:
        yield each_once(fit)
    yield here.settings()
    if servers:
        yield from _towards(servers, nccl, options)
    yield from _sent(source, drivers, servers, options)


def _towards(servers: Sequence[ServerInfo], nccl: str, options: Options) -> Iterator[Finding]:
    """What decides whether the workers of these servers can join."""
    yield here.one_group(servers)
    yield from here.device(servers, options)
    if servers[0].device == "cuda":
        yield from here.nccl_versions(nccl)
    if servers[0].backend == "streamer":
        files = here.open_files(servers)
        yield files
        if files.status == "fail":
            return
        yield from here.address([server.url for server in servers], options)


def _sent(
    source: AbstractContextManager[WeightSource] | None,
    drivers: Sequence[VllmDriver],
    servers: Sequence[ServerInfo],
    options: Options,
) -> Iterator[Finding]:
    """What decides whether the source can be sent."""
    plan = None
    if source is not None:
        found, specs = weights.readable(source)
        yield found
        if specs is None:
            return
        found, plan = weights.sendable(specs, drivers, options)
        yield found
        if plan is None:
            return
    if servers:
        yield from weights.staging(plan, servers[0].device == "cuda", options)
