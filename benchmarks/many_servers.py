"""The control plane of many servers against that of one, in the same run.

    python benchmarks/many_servers.py [--servers 64] [--latency 0 10] [--gloo]

Stub servers on loopback, all in one other process, answer the routes of vLLM, each answer after
``--latency`` milliseconds. A real `Session` connects to them and pushes one small tensor again and
again. Without ``--gloo`` the data plane is left out (its broadcasts reach nobody), so the seconds
are those of the control plane alone; with it each stub has a worker of our own engine, which joins
the group and receives over Gloo.

``connect`` is a session from nothing to joined; ``push`` a connected push, ten calls a server. The
stubs have the same two cores as the session here, so the last columns say how much of the processor
one call takes on either side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import streamer
from streamer import group
from streamer.bench.machine import describe_machine, describe_versions
from streamer.bench.null import NullTransport
from streamer.cli._output import draw_table
from streamer.receiver.endpoint import Endpoint, InitInfo

INFO = {
    "vllm_config": {
        "weight_transfer_config": {"backend": "streamer"},
        "device_config": {"device": "cpu"},
    }
}


class Stub:
    """One server: what it says, and with Gloo its worker."""

    def __init__(self, latency: float, pool: ThreadPoolExecutor | None) -> None:
        self.latency = latency
        self.pool = pool
        self.version = "default"
        self.worker = Endpoint(torch.device("cpu"), 0)
        self.memory = torch.empty(1 << 20, dtype=torch.uint8)
        self.calls = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # somebody only wanted to know whether we listen
            writer.close()
            return
        lines = head.decode().split("\r\n")
        path = lines[0].split()[1].partition("?")[0]
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        self.calls += 1
        if self.latency:
            await asyncio.sleep(self.latency)
        answer = json.dumps(await self.answer(path, json.loads(body or b"{}"))).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, dict[str, Any]] = {
            "/version": {"version": "0.33.0"},
            "/get_world_size": {"world_size": 1},
            "/server_info": INFO,
            "/weight_info": {"weight_version": self.version},
            "/is_paused": {"is_paused": False},
        }
        if path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/finish_weight_update" and body["weight_version"] is not None:
            self.version = body["weight_version"]
        elif self.pool is not None:
            await self.work(path, body)
        return said.get(path, {})

    async def work(self, path: str, body: dict[str, Any]) -> None:
        if path == "/init_weight_transfer_engine":
            info = InitInfo.parse(body["init_info"])
            step = partial(self.worker.join, info, update_open=False)
        elif path == "/update_weights":
            step = partial(self.worker.receive, body["update_info"], self.take, lambda _: None)
        elif path == "/shutdown_weight_transfer_engine":
            step = partial(self.worker.leave)
        else:
            return
        await asyncio.get_running_loop().run_in_executor(self.pool, step)

    def take(self, nbytes: int) -> torch.Tensor:
        """Where a chunk is received: one buffer, again and again."""
        return self.memory[:nbytes]


async def serve(servers: int, latency: float, gloo: bool) -> None:
    """Print the ports; on each line of standard input, the calls and processor seconds so far."""
    pool = ThreadPoolExecutor(servers) if gloo else None
    stubs = [Stub(latency, pool) for _ in range(servers)]
    ports = []
    for stub in stubs:
        server = await asyncio.start_server(stub.handle, "127.0.0.1", 0, backlog=64)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps([sum(stub.calls for stub in stubs), time.process_time()]), flush=True)


class Stubs:
    """The other process."""

    def __init__(self, servers: int, latency: float, gloo: bool) -> None:
        command = [sys.executable, __file__, "--serve", json.dumps([servers, latency, gloo])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]

    def used(self) -> tuple[int, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        calls, seconds = json.loads(self.process.stdout.readline())
        return calls, seconds

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass


def measure(servers: int, latency: float, gloo: bool, repeats: int) -> dict[str, Any]:
    connects = []
    with Stubs(servers, latency, gloo) as stubs:
        for _ in range(3):
            started = time.perf_counter()
            session = streamer.connect(stubs.urls)
            connects.append(time.perf_counter() - started)
            if len(connects) < 3:
                session.close()
        with session:
            tensors = {"weight": torch.zeros(256)}
            session.push(tensors)
            calls, theirs = stubs.used()
            ours = time.process_time()
            pushes = [session.push(tensors).seconds.total for _ in range(repeats)]
            ours = time.process_time() - ours
            more, after = stubs.used()
    made = more - calls
    return {
        "servers": servers,
        "latency": latency,
        "connect": statistics.median(connects),
        "push": statistics.median(pushes),
        "least": min(pushes),
        "calls": made / repeats / servers,
        "ours": ours / made,
        "theirs": (after - theirs) / made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--latency", type=float, nargs="*", default=[0, 10], help="milliseconds")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*json.loads(arguments.serve)))
        return
    plain = group.make_transport
    make = plain if arguments.gloo else lambda *_: (NullTransport(torch.device("cpu")), None)
    pairs = []
    with mock.patch.object(group, "make_transport", make):
        for latency in arguments.latency:
            settings = latency / 1e3, arguments.gloo, arguments.repeats
            pairs.append((measure(1, *settings), measure(arguments.servers, *settings)))
    rows = [
        (
            f"{row['latency'] * 1e3:g}",
            str(row["servers"]),
            f"{row['connect'] * 1e3:.0f}",
            f"{row['connect'] / one['connect']:.1f}x",
            f"{row['push'] * 1e3:.0f}",
            f"{row['push'] / one['push']:.1f}x",
            f"{row['least'] * 1e3:.0f}",
            f"{row['ours'] * 1e3:.2f}",
            f"{row['theirs'] * 1e3:.2f}",
        )
        for one, many in pairs
        for row in (one, many)
    ]
    columns = (
        ">delay",
        ">servers",
        ">connect",
        "",
        ">push",
        "",
        ">least",
        ">CPU a call",
        ">theirs",
    )
    draw_table(columns, rows)
    machine, versions = describe_machine(), describe_versions()
    how = "real workers over Gloo" if arguments.gloo else "control plane alone"
    print(f"milliseconds, {how}, {machine['cores']} cores, load {machine['load']}")
    print(versions)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": machine, "versions": versions, "rows": pairs}, indent=2)
        )


if __name__ == "__main__":
    main()
