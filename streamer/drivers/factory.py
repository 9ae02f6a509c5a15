"""From what a user gives as ``to``, the drivers: URLs, engines that are objects, Ray actors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from streamer.drivers.base import Driver, ServerInfo
from streamer.drivers.calls import Calls, LocalCalls
from streamer.drivers.engine import Engine, EngineLike, missing_methods
from streamer.drivers.engine_routes import EngineRoutes
from streamer.drivers.http import HttpClient, normalize_url
from streamer.drivers.routes import HttpRoutes, Routes
from streamer.drivers.secrets import hide_user
from streamer.drivers.vllm import VllmDriver
from streamer.exceptions import UsageError
from streamer.network import on_one_host
from streamer.options import Options
from streamer.timeouts import Clock

Server: TypeAlias = str | Engine | EngineLike
"""A URL, or an engine."""
Servers: TypeAlias = Server | Sequence[Server]


def listed(to: Servers | None) -> list[str | Engine]:
    """The servers of ``to``, in order. Raises `UsageError` for what is none, or for one twice."""
    if to is None:
        return []
    items: Iterable[object] = [to]
    if isinstance(to, Iterable) and not isinstance(to, str | Mapping) and missing_methods(to):
        items = to
    servers = [_server(item) for item in items]
    if not servers:
        raise UsageError("give at least one server")
    known: dict[int, str] = {}
    urls: set[str] = set()
    for number, server in enumerate(servers):
        if isinstance(server, str):
            url = normalize_url(server)
            if url in urls:
                raise UsageError(f"{hide_user(url)} is given twice: give each server once")
            urls.add(url)
        else:
            name = server.name or name_of(server.target)
            if id(server.target) in known:
                raise UsageError(f"{name} is given twice: give each engine once")
            # Two engines of one class.
            name = f"{name} #{number}" if name in known.values() else name
            servers[number] = replace(server, name=name)
            known[id(server.target)] = name
    return servers


def refuse_one_twice(servers: Sequence[ServerInfo]) -> None:
    """Raise `UsageError` if two URLs lead to one server, whose workers would be counted twice, and
    join once: that would be seen only when the others have been waited for.

    A server is known by its instance. vLLM's is so short that in a large fleet two may be alike,
    so they have to be on one host as well.
    """
    known: dict[str, ServerInfo] = {}
    for server in servers:
        first = known.setdefault(server.instance or server.url, server)
        if first is not server and on_one_host(first.url, server.url):
            raise UsageError(
                f"{first.url} and {server.url} lead to one server: give each server once"
            )


def make_driver(server: str | Engine, options: Options, clock: Clock) -> Driver:
    """The driver of one server of `listed`."""
    routes: Routes
    if isinstance(server, str):
        client = HttpClient(
            server,
            connect_timeout=options.timeouts.connect,
            headers=options.headers,
            ca_bundle=options.ca_bundle,
            trust_env=options.trust_env,
            trace=options.trace,
        )
        routes = HttpRoutes(client)
    else:
        routes = EngineRoutes(server, _calls(server), options.trace)
    return VllmDriver(
        routes,
        clock=clock,
        pause=options.pause,
        backend=options.backend,
        verify=options.verify,
    )


def refuse_on_own_loop(engines: Iterable[Engine]) -> None:
    """Raise `UsageError` on the event loop that an engine's coroutines run on.

    What is to be called blocks it, and so would wait for what cannot begin.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    for engine in engines:
        if engine.loop is loop:
            raise UsageError(
                f"{engine.name} runs on this event loop, which a push would block: await "
                "session.apush, streamer.apush or aconnect, or push from another thread"
            )


def name_of(target: object) -> str:
    """What an engine without a name is called: its class, or the actor."""
    return repr(target) if is_actor(target) else type(target).__name__


def is_actor(target: object) -> bool:
    """Whether ``target`` is a handle of a Ray actor; there is none where Ray is not imported."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(target, ray.actor.ActorHandle)


def _calls(engine: Engine) -> Calls:
    if is_actor(engine.target):
        from streamer.drivers.ray import RayCalls

        return RayCalls(engine.target, engine.name)
    return LocalCalls(engine.target, engine.name, engine.loop)


def _server(item: object) -> str | Engine:
    if isinstance(item, str):
        return item
    engine = item if isinstance(item, Engine) else Engine(item)
    missing = missing_methods(engine.target)
    if missing:
        raise UsageError(
            f"{engine.target!r:.100} is no server: give a URL, or an engine with the methods of "
            f"vLLM's weight transfer (it has no {', '.join(missing)})"
        )
    return engine
