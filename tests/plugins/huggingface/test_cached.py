"""Through the cache: what is asked for, when it is streamed, and what stops."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import save

from streamer import SourceError


def asked(hub, word: str) -> list[str]:
    return [f"{each.method} {each.path}" for each in hub.asked if word in each.path]


def downloads(hub) -> list[str]:
    """Whole files that were asked of the storage."""
    return [each for each in hub.asked if each.host == "cdn" and "Range" not in each.headers]


def download_of(model, *shards: int):
    """Whether a request downloads one of these shards, counted from 0."""
    digests = [hashlib.sha256(model.files[model.weights[i]]).hexdigest() for i in shards]
    return lambda each: each.path[1:65] in digests and "Range" not in each.headers


def workers() -> list[int]:
    """Processes of ours that download."""
    children = []
    for task in os.listdir("/proc/self/task"):
        children += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return [pid for pid in children if b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def cache(hub, tmp_path, monkeypatch):
    """Put files of ``org/name`` into the cache of the test, as any user of the library does."""

    def put(*names: str) -> None:
        with monkeypatch.context() as online:
            online.setattr(constants, "HF_HUB_OFFLINE", False)
            for name in names:
                hf_hub_download(
                    "org/name",
                    name,
                    cache_dir=tmp_path / "cache",
                    endpoint=hub.url,
                    token=False,
                )
        hub.clear()

    return put


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("no_threads_left")
class TestWhatIsAsked:
    def test_the_needed_files_alone(self, hub, model, open_hub, contents, tmp_path):
        source = open_hub("org/name")
        assert source.weight_version == hub.repos["org/name"].revisions["main"]
        assert [spec.name for spec in source.specs()] == list(model.tensors)
        assert downloads(hub) == []
        assert contents(source) == model.raw
        there = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_symlink()}
        assert there == {*map(os.path.basename, model.weights), "model.safetensors.index.json"}

    def test_every_weight_byte_is_sent_once(self, hub, model, open_hub, contents):
        contents(open_hub("org/name"))
        assert len(downloads(hub)) == 2
        for name in model.weights:
            header = 8 + int.from_bytes(model.files[name][:8], "little")
            size = len(model.files[name])
            assert hub.bodies(model.files[name]) == [(0, 64), (0, size), (8, header)]

    def test_a_pinned_commit_in_the_cache_asks_nothing(self, hub, model, open_hub, contents):
        """Case 27."""
        commit = hub.repos["org/name"].revisions["v1.0"]
        contents(open_hub(f"org/name@{commit}"))
        hub.clear()
        source = open_hub(f"org/name@{commit}")
        assert contents(source) == model.raw
        assert source.weight_version == commit
        assert hub.asked == []

    def test_a_branch_in_the_cache_asks_which_commit_it_is(self, hub, model, open_hub, contents):
        contents(open_hub("org/name@feat/x"))
        hub.clear()
        assert contents(open_hub("org/name@feat/x")) == model.raw
        assert asked(hub, "") == ["GET /api/models/org/name/revision/feat/x"]

    def test_what_others_put_into_the_cache_is_used(self, hub, model, cache, open_hub, contents):
        cache(model.weights[0])
        assert contents(open_hub("org/name")) == model.raw
        assert asked(hub, "00001-of") == []
        assert len(downloads(hub)) == 1

    def test_a_second_pass_and_a_second_source_ask_for_no_weights(
        self, hub, model, open_hub, contents
    ):
        source = open_hub("org/name")
        contents(source)
        hub.clear()
        assert contents(source) == model.raw
        assert hub.asked == []
        assert contents(open_hub("org/name")) == model.raw
        assert asked(hub, "resolve") == []

    def test_download_first(self, hub, model, open_hub, contents):
        source = open_hub("org/name", download_first="true")
        assert len(downloads(hub)) == 2
        hub.clear()
        assert contents(source) == model.raw
        assert hub.asked == []


class TestWhichFiles:
    def test_a_single_file(self, publish, open_hub, contents):
        files = {
            "model.safetensors": {"a": torch.ones(3)},
            "other.safetensors": {"b": torch.ones(3)},
        }
        publish({name: save(tensors) for name, tensors in files.items()})
        assert list(contents(open_hub("org/name"))) == ["a"]
        assert list(contents(open_hub("org/name/other.safetensors", no_cache=True))) == ["b"]

    def test_a_folder(self, publish, make_model, open_hub, contents):
        model = make_model(2, folder="sub/folder")
        publish(model.files, "x/y")
        assert contents(open_hub("org/name/sub/folder@x/y")) == model.raw
        assert contents(open_hub("org/name/sub/folder@x/y", no_cache=True)) == model.raw

    def test_an_index_by_name(self, publish, model, open_hub, contents):
        assert contents(open_hub("org/name/model.safetensors.index.json")) == model.raw

    def test_what_is_left_out_is_said(self, model, publish, open_hub, caplog):
        caplog.set_level(logging.WARNING, "streamer")
        publish({**model.files, "extra.safetensors": save({"a": torch.ones(1)})})
        open_hub("org/name")
        assert "ignored: adapter_model.safetensors, extra.safetensors" in caplog.text

    @pytest.mark.parametrize(
        ("files", "rest", "expected"),
        [
            ({}, "org/name", r"hf://org/name@main: it has no files"),
            ({"a": b""}, "org/name", r"hf://org/name@main: .* no \*\.safetensors file, only a"),
            ({"a.bin": b""}, "org/name", r"only PyTorch files \(a\.bin\): convert"),
            ({"sub/m.safetensors": b""}, "org/name", r"its subfolders do, name one of them: sub"),
            ({"a": b""}, "org/name/sub", r"no file and no folder sub \(no token was sent\)"),
            (
                {"adapter_model.safetensors": b""},
                "org/name",
                r"hf://org/name@main: .* only a LoRA adapter",
            ),
            ({"m-00001-of-00002.safetensors": b""}, "org/name", "1 of the 2 shards"),
            (
                {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
                "org/name",
                r"hf://org/name@main: .*no plain path inside its own folder: refused",
            ),
            (
                {"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'},
                "org/name",
                r"1 of 1 shards .* not in the repository: x\.safetensors; take another revision",
            ),
            (
                {n: save({"a": torch.ones(1)}) for n in ("x.safetensors", "y.safetensors")},
                "org/name",
                r"tensor a is both in x\.safetensors and in y\.safetensors",
            ),
        ],
    )
    @pytest.mark.parametrize("no_cache", [True, False])
    def test_what_is_no_model(self, publish, open_hub, files, rest, expected, no_cache):
        publish(files)
        with pytest.raises(SourceError, match=expected) as caught:
            open_hub(rest, no_cache=no_cache)
        assert str(caught.value).isprintable()


@pytest.mark.usefixtures("offline")
class TestOffline:
    @pytest.fixture
    def cached(self, model, cache):
        cache(*model.weights, "model.safetensors.index.json")

    @pytest.mark.usefixtures("cached")
    def test_all_in_the_cache(self, hub, model, open_hub, contents):
        source = open_hub("org/name")
        assert contents(source) == model.raw
        assert source.weight_version == hub.repos["org/name"].revisions["main"]
        assert hub.asked == []

    def test_all_but_one_file(self, model, cache, open_hub):
        """Case 28."""
        cache("model.safetensors.index.json", model.weights[0])
        expected = (
            r"HF_HUB_OFFLINE is set, and 1 of the 2 files of the model are not in the cache: "
            r"model-00002-of-00002\.safetensors \(no token was sent\); unset it"
        )
        with pytest.raises(SourceError, match=expected):
            open_hub("org/name")

    def test_a_branch_that_we_have_opened_before(self, hub, model, open_hub, contents, monkeypatch):
        with monkeypatch.context() as online:
            online.setattr(constants, "HF_HUB_OFFLINE", False)
            contents(open_hub("org/name@feat/x"))
        hub.clear()
        assert contents(open_hub("org/name@feat/x")) == model.raw
        assert hub.asked == []

    @pytest.mark.parametrize("how", ["opened", "broken off", "read"])
    def test_a_branch_that_has_moved_since(
        self, hub, model, cache, publish, make_model, open_hub, contents, monkeypatch, how
    ):
        """The commit before it is of use until all of the new one is there."""
        cache(*model.weights, "model.safetensors.index.json")
        moved = make_model(3)
        publish(moved.files)
        with monkeypatch.context() as online:
            online.setattr(constants, "HF_HUB_OFFLINE", False)
            source = open_hub("org/name")
            if how == "read":
                contents(source)
            elif how == "broken off":
                pairs = iter(source)
                next(pairs)
                pairs.close()
        expected = moved if how == "read" else model
        assert contents(open_hub("org/name")) == expected.raw

    @pytest.mark.parametrize("rest", ["org/name", "org/name@v1.0", f"org/name@{'0' * 40}"])
    def test_nothing_in_the_cache(self, hub, open_hub, rest):
        with pytest.raises(SourceError, match=r"HF_HUB_OFFLINE is set, and .* the cache"):
            open_hub(rest)
        with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set, and no_cache reads from"):
            open_hub(rest, no_cache=True)
        assert hub.asked == []

    def test_files_that_do_not_tell(self, publish, cache, open_hub, contents):
        publish({"m.safetensors": save({"a": torch.ones(1)})})
        cache("m.safetensors")
        with pytest.raises(SourceError, match=r"do not tell which ones.* name the one"):
            open_hub("org/name")
        assert list(contents(open_hub("org/name/m.safetensors"))) == ["a"]


@pytest.mark.usefixtures("no_threads_left")
class TestDownloadsUnderWay:
    def test_a_shard_comes_while_the_next_ones_download(self, hub, publish, make_model, open_hub):
        model = make_model(4)
        publish(model.files)
        source = open_hub("org/name")
        stuck = hub.fault(download_of(model, 2, 3), times=99, silent=60)
        names = []
        for name, payload in source:
            payload.read_into(memoryview(bytearray(4)), 0, 4)
            names.append(name)
            if name == list(model.tensors)[13]:  # the last one of the second shard
                break
        assert stuck.times >= 97
        assert names == list(model.tensors)[:14]

    def test_an_error_waits_for_its_tensor(self, hub, publish, make_model, open_hub):
        model = make_model(3)
        publish(model.files)
        source = open_hub("org/name")
        bad = model.weights[1]
        hub.fault(lambda each: bad in each.path and each.method == "HEAD", times=99, status=403)
        names = []
        with pytest.raises(SourceError, match=rf"hf://org/name@main: {bad}: .*\(403\)"):  # noqa: PT012
            for name, _ in source:
                names.append(name)
        assert names == list(model.tensors)[:7]

    def test_a_broken_download_goes_on(self, hub, model, open_hub, contents):
        hub.fault(download_of(model, 0), breaks_after=1 << 20)
        assert contents(open_hub("org/name")) == model.raw

    @pytest.mark.parametrize("how", ["source", "iterator"])
    def test_an_early_close_stops_them_at_once(
        self, hub, publish, make_model, open_hub, tmp_path, eventually, how
    ):
        model = make_model(3, large=4)
        publish(model.files)
        source = open_hub("org/name")
        hub.fault(download_of(model, 1, 2), times=99, silent=60)
        iterator = iter(source)
        next(iterator)
        assert len(workers()) == 1
        eventually(lambda: len(downloads(hub)) > 1)
        started = time.monotonic()
        source.close() if how == "source" else iterator.close()
        assert time.monotonic() - started < 5
        assert workers() == []
        assert list((tmp_path / "cache").rglob("*.incomplete")) == []
        with pytest.raises((SourceError, StopIteration)):
            [next(iterator) for _ in model.tensors]

    def test_a_close_from_another_thread_wakes_the_iterator(self, hub, model, open_hub, eventually):
        source = open_hub("org/name")
        hub.fault(download_of(model, 0, 1), times=99, silent=60)
        errors: list[Exception] = []

        def iterate() -> None:
            try:
                list(source)
            except SourceError as error:
                errors.append(error)

        thread = threading.Thread(target=iterate)
        thread.start()
        eventually(lambda: downloads(hub))
        source.close()
        thread.join(10)
        assert "the process that downloads has ended" in str(errors[0])

    def test_a_download_that_dies(self, hub, model, open_hub):
        source = open_hub("org/name")
        hub.fault(download_of(model, 0, 1), times=99, silent=60)
        iterator = iter(source)
        killer = threading.Timer(1.0, lambda: [os.kill(pid, 9) for pid in workers()])
        killer.start()
        with pytest.raises(SourceError, match=r"00001.*the process that downloads has ended"):
            next(iterator)
        killer.join()

    def test_a_file_other_than_announced(self, hub, model, open_hub):
        source = open_hub("org/name")
        other = lambda data: data.replace(b"l1.norm0", b"l1.other", 1)  # noqa: E731
        hub.fault(download_of(model, 0), change=other)
        expected = r"header of .*00001-of-00002\.safetensors is not the one that model-00001.*had"
        with pytest.raises(SourceError, match=expected):
            next(iter(source))

    def test_closed(self, model, open_hub, contents):
        source = open_hub("org/name")
        contents(source)
        source.close()
        source.close()
        with pytest.raises(SourceError, match="the source was closed"):
            next(iter(source))
