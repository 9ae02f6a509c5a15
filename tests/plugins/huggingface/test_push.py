"""From the Hub into the reference server, both ways, and how much of it is at the same time."""

from __future__ import annotations

import hashlib
import itertools
import time

import pytest
import torch
from safetensors.torch import save
from streamer_huggingface import retry

import streamer
from streamer import SourceError
from streamer.transport.gloo import GlooTransport

MIB = 1 << 20


def holds(server, model) -> bool:
    """Whether both workers hold every byte of ``model``."""
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in model.raw.items()}
    found = server.checksums()
    assert len(found) == 2
    return all({name: held.get(name) for name in expected} == expected for held in found)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
@pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])
class TestEndToEnd:
    def test_both_workers_hold_every_byte(
        self, hub, publish, make_model, open_hub, server, tmp_path, no_cache, packed
    ):
        model = make_model(3, large=3, size=6 * MIB + 2)
        commit = publish(model.files)
        source = open_hub("org/name", no_cache=no_cache)
        hub.clear()
        buffer_size = 20 * MIB
        report = streamer.push(source, server.url, packed=packed, buffer_size=buffer_size)
        assert holds(server, model)
        assert report.weight_version == server.weight_version == commit
        asked = [each for each in hub.asked if each.host == "cdn"]
        total = sum(map(len, model.raw.values()))
        if no_cache:
            spans = sorted((each.path, each.start, each.start + each.sent) for each in asked)
            for left, right in itertools.pairwise(spans):
                assert left[0] != right[0] or left[2] <= right[1]
            assert sum(each.sent for each in asked) == total
            print(f"{len(asked)} requests, {total / (16 * MIB):.1f} x 16 MiB")
            # One a 16 MiB, and up to one more where a chunk or a file ends.
            assert len(hub.asked) <= total / (16 * MIB) + report.chunks + 3
            assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        else:
            whole = [each.sent for each in asked if "Range" not in each.headers]
            assert whole == [len(model.files[name]) for name in model.weights]


@pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])
def test_a_link_may_be_slow(hub, publish, make_model, open_hub, server, no_cache):
    """A file takes longer than the progress timeout; its bytes come in all the time."""
    # huggingface_hub writes 10 MiB at a time.
    rate, size, patience = (2, 8, 1.0) if no_cache else (20, 120, 3.5)
    model = make_model(1, large=1, size=size * MIB)
    publish(model.files)
    source = open_hub("org/name", no_cache=no_cache)
    hub.rate = rate * MIB
    report = streamer.push(source, server.url, timeouts=streamer.Timeouts(20, patience))
    assert report.seconds.update > 1.5 * patience
    assert holds(server, model)


@pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])
class TestTheSameWeights:
    """What a server has already, and what only looks like it."""

    def test_another_folder_of_the_commit_is_not_it(self, publish, open_hub, server, no_cache):
        steps = {f"step-{n}": {"w": torch.full((4,), float(n))} for n in (100, 200)}
        files = {f"{name}/model.safetensors": save(state) for name, state in steps.items()}
        commit = publish(files)
        for name, state in steps.items():
            place = f"org/name/{name}"
            for rest in (place, f"{place}/model.safetensors"):
                source = open_hub(rest, no_cache=no_cache)
                report = streamer.push(source, server.url)
                assert report.tensors == 1
                assert report.weight_version == f"{commit}:{rest.removeprefix('org/name/')}"
                assert server.holds(state)
            assert streamer.push(source, server.url).tensors == 0

    def test_nor_what_is_changed_on_the_way(self, model, open_hub, server, no_cache):
        source = open_hub("org/name", no_cache=no_cache)
        assert streamer.push(source, server.url, force=True).tensors == len(model.tensors)
        assert streamer.push(source, server.url).tensors == 0
        for changed in (streamer.rename(source, "^", "x."), streamer.cast(source, "float32")):
            assert streamer.push(changed, server.url).tensors == len(model.tensors)


@pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])
def test_a_wait_that_the_hub_asks_for_is_no_standstill(hub, model, open_hub, server, no_cache):
    source = open_hub("org/name", no_cache=no_cache)
    digest = hashlib.sha256(model.files[model.weights[1]]).hexdigest()
    hub.fault(lambda each: digest in each.path, status=429, headers={"Retry-After": "9"})
    report = streamer.push(source, server.url, timeouts=streamer.Timeouts(20, 3), force=True)
    assert report.seconds.update > 5
    assert holds(server, model)


def test_a_wait_counts_until_it_should_be_over(monkeypatch):
    told = retry.ToldWaits()

    def at(second: float) -> int:
        with monkeypatch.context() as clock:
            clock.setattr(retry.time, "monotonic", lambda: second)
            if second in waits:
                told.add(waits[second])
            return told.progress()

    waits = {1000.0: 400, 1002.0: 3}
    seen = [at(second) for second in (1000.0, 1001.0, 1002.0, 1004.0, 1005.0, 1006.0, 1400.0)]
    assert seen == [0, 0, 1_002_000, 1_004_000, 1_005_000, 1_005_000, 1_005_000]


class TestFailures:
    def test_a_shard_that_fails_half_way(self, hub, model, open_hub, server, eventually):
        source = open_hub("org/name")
        bad = model.weights[1]
        hub.fault(lambda each: bad in each.path and each.method == "HEAD", times=99, status=403)
        with pytest.raises(SourceError, match=rf"hf://org/name@main: {bad}: .*\(403") as caught:
            streamer.push(source, server.url, buffer_size=MIB)
        assert server.url in caught.value.held
        hub.faults.clear()
        assert streamer.push(source, server.url).tensors == len(model.tensors)
        assert holds(server, model)

    def test_ranges_that_fail_half_way(self, hub, publish, make_model, open_hub, server):
        model = make_model(2, large=4, size=MIB)
        publish(model.files)
        source = open_hub("org/name", no_cache=True)
        digest = hashlib.sha256(model.files[model.weights[1]]).hexdigest()
        hub.fault(lambda each: digest in each.path, times=99, status=500)
        with pytest.raises(SourceError, match=r"model-00002.*the Hub failed \(500\)") as caught:
            streamer.push(source, server.url, buffer_size=MIB)
        assert server.url in caught.value.held
        hub.faults.clear()
        assert streamer.push(source, server.url, buffer_size=MIB).tensors == len(model.tensors)
        assert holds(server, model)


def test_download_and_push_overlap(hub, publish, make_model, open_hub, server, monkeypatch):
    """One after the other they would take at least D + P, for both are made of waiting: the Hub
    sends at a given rate, and each broadcast sleeps. ``benchmarks/hub_overlap.py`` measures the
    same against the bound that is promised."""
    model = make_model(8, large=2, size=MIB)
    publish(model.files)
    download, broadcasts, pause = 4.0, 16, 0.22
    hub.rate = sum(len(model.files[name]) for name in model.weights) / download
    plain = GlooTransport.broadcast

    def slow(self, tensor, timeout):
        time.sleep(pause)
        plain(self, tensor, timeout)

    monkeypatch.setattr(GlooTransport, "broadcast", slow)
    started = time.monotonic()
    report = streamer.push(open_hub("org/name"), server.url, buffer_size=MIB // 2)
    both = time.monotonic() - started
    assert holds(server, model)
    assert report.chunks == broadcasts
    assert both < 0.88 * (download + broadcasts * pause)
