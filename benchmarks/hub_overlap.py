"""How much of a download from the Hub and of a push happens at the same time.

    python benchmarks/hub_overlap.py [--seconds 10] [--shards 8]

Starts a Hub that sends a model within the given seconds, and the reference server with two workers.
Each broadcast sleeps first, so that a push alone takes a third, as long, or three times as long as
the download. Prints the seconds of the download alone (D), the push alone (P), and of both
together. The bound is 1.15 * max(D, P), and a shard's share of max(D, P): the exit code is 1 if it
does not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import streamer
from streamer.transport.gloo import GlooTransport

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
BUFFER = 4 * MIB


def fake_hub() -> Any:
    """The module of the tests that has the Hub and the model."""
    path = ROOT / "tests/plugins/huggingface/fake_hub.py"
    spec = importlib.util.spec_from_file_location("fake_hub", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def push(source: streamer.WeightSource, url: str, pause: float, version: str) -> float:
    started = time.perf_counter()
    with mock.patch.object(GlooTransport, "broadcast", slow(pause)):
        streamer.push(source, url, buffer_size=BUFFER, weight_version=version)
    return time.perf_counter() - started


def slow(pause: float) -> Callable[..., None]:
    """A broadcast that takes ``pause`` seconds more."""
    plain = GlooTransport.broadcast

    def broadcast(self: GlooTransport, tensor: torch.Tensor, timeout: float) -> None:
        time.sleep(pause)
        plain(self, tensor, timeout)

    return broadcast


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--shards", type=int, default=8)
    arguments = parser.parse_args()
    module = fake_hub()
    hub = module.FakeHub()
    model = module.build_model(arguments.shards, large=2, size=8 * MIB)
    hub.repos["org/name"] = module.Repo()
    hub.repos["org/name"].commit(model.files)
    hub.rate = sum(len(model.files[name]) for name in model.weights) / arguments.seconds
    command = [sys.executable, "-m", "streamer", "serve", "--workers", "2", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    url = line[line.index("http") :].split()[0].rstrip(".,;")
    kept = True
    print(f"{'P / D':>6} {'D':>7} {'P':>7} {'both':>7} {'bound':>7}   seconds")
    try:
        for ratio in (1 / 3, 1.0, 3.0):
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                options = {"endpoint": hub.url, "token": False}
                with closing(
                    streamer.open_source("hf://org/name", cache_dir=one, **options)
                ) as source:
                    chunks = len(streamer.make_plan(source.specs(), buffer_size=BUFFER).chunks)
                    pause = ratio * arguments.seconds / chunks
                    started = time.perf_counter()
                    sum(1 for _ in source)
                    download = time.perf_counter() - started
                    alone = push(source, url, pause, f"alone{ratio}")
                started = time.perf_counter()
                with closing(
                    streamer.open_source("hf://org/name", cache_dir=two, **options)
                ) as source:
                    push(source, url, pause, f"both{ratio}")
                both = time.perf_counter() - started
            longer = max(download, alone)
            bound = 1.15 * longer + longer / arguments.shards
            print(f"{ratio:6.2f} {download:7.2f} {alone:7.2f} {both:7.2f} {bound:7.2f}")
            kept &= both <= bound
    finally:
        server.terminate()
        server.wait()
        hub.stop()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
