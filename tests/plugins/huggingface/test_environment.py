"""The variables that users of ``huggingface_hub`` know, each in a process that starts with them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import close_session

from streamer import SourceError

GOOD = "hf_GoodTokenOfAGoodUser"

_READ = """
import json, sys, hashlib, streamer
from streamer_huggingface import retry

retry.FIRST_WAIT = 0.02

def read(rest, **options):
    source = streamer.open_source(rest, **options)
    try:
        digests = {}
        sizes = {spec.name: spec.nbytes for spec in source.specs()}
        for name, payload in source:
            data = bytearray(sizes[name])
            payload.read_into(memoryview(data), 0, len(data))
            digests[name] = hashlib.sha256(data).hexdigest()
        return digests
    except streamer.StreamerError as error:
        return str(error)
    finally:
        source.close()

found = []
for rest, options in json.loads(sys.argv[1]):
    try:
        found.append(read(rest, **options))
    except streamer.StreamerError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.fixture
def read(tmp_path):
    """Read sources in a process with ``environment``: digests by name, or the error, of each."""

    def run(environment: dict[str, str], *sources: tuple[str, dict[str, object]]) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", _READ, json.dumps(sources)],
            env={**os.environ, "HOME": str(tmp_path), "NO_PROXY": "", **environment},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert GOOD not in done.stdout + done.stderr
        found: list[object] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture
def digests(model):
    return {name: hashlib.sha256(data).hexdigest() for name, data in model.raw.items()}


def test_endpoint_token_home_and_offline(hub, model, read, digests, tmp_path):
    hub.repos["org/name"].private = True
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": GOOD, "HF_HOME": str(tmp_path / "home")}
    both = [("hf://org/name@v1.0", {"no_cache": True}), ("hf://org/name@v1.0", {})]
    assert read(environment, *both) == [digests, digests]
    assert (tmp_path / "home" / "hub" / "models--org--name" / "snapshots").is_dir()
    hub.clear()
    offline, direct, other = read(
        {**environment, "HF_HUB_OFFLINE": "1"},
        ("hf://org/name@v1.0", {}),
        ("hf://org/name@v1.0", {"no_cache": True}),
        ("hf://org/name", {}),
    )
    assert offline == digests
    assert "HF_HUB_OFFLINE is set, and no_cache reads from the Hub (a token was sent)" in direct
    assert "HF_HUB_OFFLINE is set, and this revision is not in the cache" in other
    assert hub.asked == []


@pytest.fixture
def proxy(monkeypatch):
    """Set HTTP_PROXY. The client of ``huggingface_hub`` looks at it when it is made."""

    def set_to(url: str, no_proxy: str) -> None:
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("NO_PROXY", no_proxy)
        close_session()

    yield set_to
    close_session()


@pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])
class TestTheProxyIsObeyed:
    """Case 37."""

    def test_a_host_that_exists_for_the_proxy_alone(
        self, hub, model, open_hub, contents, proxy, no_cache
    ):
        proxy(hub.url, "127.0.0.1")
        source = open_hub("org/name", no_cache=no_cache, endpoint="http://hub.invalid")
        assert contents(source) == model.raw

    def test_a_proxy_that_is_not_there(self, hub, model, open_hub, proxy, free_port, no_cache):
        proxy(f"http://127.0.0.1:{free_port()}", "")
        expected = r"hf://org/name@main: no answer from 127\.0\.0\.1.*HTTPS_PROXY"
        with pytest.raises(SourceError, match=expected):
            open_hub("org/name", no_cache=no_cache)
        assert hub.asked == []


def test_options_as_the_command_line_gives_them(hub, model, open_hub, contents):
    hub.repos["org/name"].private = True
    source = open_hub("org/name", no_cache="true", connections="4", token=GOOD)
    assert contents(source) == model.raw
    with pytest.raises(SourceError, match="no token was sent"):
        open_hub("org/name", no_cache="False", token="false")
