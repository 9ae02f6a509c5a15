"""The Hub of these tests, models on it, and sources opened from it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from streamer_huggingface import retry

import streamer

_SPEC = importlib.util.spec_from_file_location("fake_hub", Path(__file__).with_name("fake_hub.py"))
fake_hub: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_hub"] = fake_hub
_SPEC.loader.exec_module(fake_hub)


@pytest.fixture
def hub() -> Iterator[Any]:
    hub = fake_hub.FakeHub()
    yield hub
    hub.stop()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No login, cache, folder or proxy of whoever runs the tests; no long waits before the next
    try."""
    for name in [name for name in os.environ if re.match(r"HF_|.*_proxy$", name, re.IGNORECASE)]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "HF_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("HF_HOME", "HF_ASSETS_CACHE", "HF_XET_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / name), raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.02)


@pytest.fixture
def open_hub(hub: Any, tmp_path: Any) -> Iterator[Callable[..., streamer.WeightSource]]:
    """Open ``hf://rest`` on the fake Hub with a cache of the test's own; closed at the end."""
    opened = []

    def open_source(rest: str, **options: Any) -> streamer.WeightSource:
        options = {"endpoint": hub.url, **options}
        if not options.get("no_cache"):
            options = {"cache_dir": tmp_path / "cache", **options}
        opened.append(streamer.open_source(f"hf://{rest}", **options))
        return opened[-1]

    yield open_source
    for source in opened:
        source.close()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """`fake_hub.build_model`."""
    return fake_hub.build_model


@pytest.fixture
def publish(hub: Any) -> Callable[..., str]:
    """Commit files to a model, ``org/name`` by default, on given branches; returns the commit."""

    def put(files: dict[str, bytes], *revisions: str, repo: str = "org/name") -> str:
        return hub.repos.setdefault(repo, fake_hub.Repo()).commit(files, *revisions)

    return put


@pytest.fixture
def model(publish: Callable[..., str], make_model: Callable[..., Any]) -> Any:
    """Two shards of 2 MiB, on the Hub as ``org/name``, on the branches main and ``feat/x``."""
    made = make_model()
    publish(made.files, "main", "feat/x", "v1.0")
    return made


def _contents(source: streamer.WeightSource, threads: int = 4) -> dict[str, bytes]:
    sizes = {spec.name: spec.nbytes for spec in source.specs()}

    def read(pair: tuple[str, streamer.Payload]) -> tuple[str, bytes]:
        name, payload = pair
        assert isinstance(payload, streamer.DeferredTensor)
        data = bytearray(sizes[name])
        payload.read_into(memoryview(data), 0, len(data))
        return name, bytes(data)

    with ThreadPoolExecutor(threads) as pool:
        return dict(pool.map(read, source))


@pytest.fixture(scope="session")
def contents() -> Callable[..., dict[str, bytes]]:
    """The bytes of every tensor of a source, read by several threads."""
    return _contents
