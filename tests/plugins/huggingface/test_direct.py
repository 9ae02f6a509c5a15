"""Without a cache: right bytes from ranges, each asked for once, whatever the network does."""

from __future__ import annotations

import io
import resource
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

import streamer
from streamer import SourceError


def weights(asked) -> bool:
    """A request for weights: those for headers end before byte 600."""
    return asked.host == "cdn" and int(asked.headers["Range"].rpartition("-")[2]) > 600


def overlaps(spans: list[tuple[int, int]]) -> int:
    """Bytes that were sent more than once."""
    twice, end = 0, 0
    for start, stop in sorted(spans):
        twice += max(min(stop, end) - start, 0)
        end = max(end, stop)
    return twice


def files_below(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def first(source: streamer.WeightSource) -> streamer.Payload:
    return next(iter(source))[1]


@pytest.fixture
def direct(open_hub, model):
    """``org/name``, opened."""
    return open_hub("org/name", no_cache=True)


class TestRead:
    def test_the_model_at_its_commit(self, hub, model, direct, contents, tmp_path):
        assert direct.weight_version == hub.repos["org/name"].revisions["main"]
        assert [spec.name for spec in direct.specs()] == list(model.tensors)
        assert contents(direct) == model.raw
        assert files_below(tmp_path) == []

    def test_nothing_can_be_written_to_disk_meanwhile(self, model, open_hub, contents, monkeypatch):
        """Not even for a moment: with this limit to a file's size every write to one fails."""
        monkeypatch.setattr(sys, "stderr", io.StringIO())  # which pytest may have made a file
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            found = contents(open_hub("org/name", no_cache=True))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert found == model.raw

    def test_each_weight_byte_is_sent_once(self, hub, model, direct, contents):
        hub.clear()
        contents(direct)
        assert sum(asked.sent for asked in hub.asked) == sum(map(len, model.raw.values()))
        assert [overlaps(hub.bodies(model.files[name])) for name in model.weights] == [0, 0]
        assert {asked.host for asked in hub.asked} == {"cdn"}
        assert len(hub.asked) <= 2 * len(model.weights)

    def test_every_pass_reads_afresh(self, hub, model, direct, contents):
        assert contents(direct) == contents(direct) == model.raw

    def test_only_headers_at_the_opening(self, hub, direct):
        direct.specs()
        assert sum(each.sent for each in hub.asked if each.host == "cdn") < 2000
        wrong = ("consolidated", "adapter", ".bin")
        assert not [each for each in hub.asked if any(name in each.path for name in wrong)]

    def test_a_moved_branch_is_read_as_it_was(self, model, make_model, publish, open_hub, contents):
        source = open_hub("org/name@feat/x", no_cache=True)
        moved = publish(make_model(1).files, "feat/x")
        assert contents(source) == model.raw
        again = open_hub("org/name@feat/x", no_cache=True)
        assert again.weight_version == moved != source.weight_version
        assert len(again.specs()) < len(source.specs())

    def test_an_empty_file_and_a_broken_one_are_named(self, publish, model, open_hub):
        files = model.files
        publish({**files, model.weights[0]: b""})
        with pytest.raises(SourceError, match=r"hf://org/name@main: model-00001.* is empty"):
            open_hub("org/name", no_cache=True)
        publish({**files, model.weights[1]: files[model.weights[1]][:-8]})
        with pytest.raises(SourceError, match=r"hf://org/name@main: model-00002.* truncated"):
            open_hub("org/name", no_cache=True)

    def test_a_server_without_ranges(self, hub, model, open_hub):
        hub.ranges = False
        source = open_hub("org/name", no_cache=True)
        with pytest.raises(SourceError, match="the server does not answer range requests"):
            dict(source)["l1.w1"].read_into(memoryview(bytearray(4)), (1 << 20) - 4, 1 << 20)

    def test_nothing_is_left_open(self, model, open_hub, contents, leaks, eventually):
        def read() -> None:
            source = open_hub("org/name", no_cache=True)
            assert contents(source) == model.raw
            source.close()
            assert leaks()["threads"] == 0

        read()
        few = leaks()["fds"]
        for _ in range(5):
            read()
        # The server here closes its ends when it comes to it.
        eventually(lambda: leaks()["fds"] <= few)

    def test_closed(self, direct):
        payload = first(direct)
        direct.close()
        direct.close()
        with pytest.raises(SourceError, match=r"cannot read hf://org/name@main: the source was cl"):
            next(iter(direct))
        with pytest.raises(SourceError, match=r"tensor l1\.norm0 .*the source was closed"):
            payload.read_into(memoryview(bytearray(4)), 0, 4)


class TestTheToken:
    def test_it_goes_to_the_hub_alone(self, hub, model, open_hub, contents):
        hub.repos["org/name"].private = True
        contents(open_hub("org/name", no_cache=True, token="hf_GoodTokenOfAGoodUser"))
        sent = {(asked.host, bool(asked.headers.get("Authorization"))) for asked in hub.asked}
        sent |= {(asked.host, True) for asked in hub.asked if asked.headers.get("authorization")}
        assert ("cdn", True) not in sent
        assert ("hub", True) in sent

    def test_none_of_another_account(self, hub, model, open_hub, contents, tmp_path, monkeypatch):
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert contents(open_hub("org/name", no_cache=True)) == model.raw
        assert not [asked for asked in hub.asked if asked.headers.get("Authorization")]


class TestABadNetwork:
    def test_a_broken_answer_goes_on_where_it_broke(self, hub, model, direct, contents):
        hub.clear()
        hub.fault(weights, breaks_after=700_000)
        hub.fault(weights, breaks_after=100)
        assert contents(direct) == model.raw
        assert [overlaps(hub.bodies(model.files[name])) for name in model.weights] == [0, 0]
        assert sum(asked.sent for asked in hub.asked) == sum(map(len, model.raw.values()))

    def test_it_gives_up(self, hub, direct):
        hub.fault(weights, times=100, breaks_after=100)
        with pytest.raises(SourceError, match=r"hf://org/name@main: model-00001.* no answer from"):
            first(direct).read_into(memoryview(bytearray(4)), 0, 4)
        assert len([asked for asked in hub.asked if weights(asked)]) == 5

    def test_much_progress_is_no_giving_up(self, hub, publish, open_hub, make_model, contents):
        model = make_model(1, large=1, size=12 << 20)
        publish(model.files)
        hub.fault(weights, times=8, breaks_after=(1 << 20) + 5)
        assert contents(open_hub("org/name", no_cache=True)) == model.raw

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_it_waits_as_it_is_told(self, hub, direct, model, contents, status):
        hub.fault(weights, status=status, headers={"Retry-After": "1"})
        started = time.monotonic()
        assert contents(direct) == model.raw
        assert time.monotonic() - started >= 1

    def test_the_hub_itself_says_wait(self, hub, model, open_hub, contents):
        hub.fault(lambda asked: "/api/" in asked.path, times=2, status=429)
        hub.fault(lambda asked: "index.json" in asked.path, status=429)
        hub.fault(lambda asked: "/resolve/" in asked.path, status=429, headers={"Retry-After": "0"})
        assert contents(open_hub("org/name", no_cache=True)) == model.raw

    def test_a_wait_that_is_too_long(self, hub, direct):
        hub.fault(weights, status=429, headers={"Retry-After": "4000"})
        with pytest.raises(SourceError, match=r"too many requests .*wait for 4000 s"):
            first(direct).read_into(memoryview(bytearray(4)), 0, 4)

    def test_a_silent_server(self, hub, direct, model, contents, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        hub.fault(weights, silent=1.0)
        assert contents(direct) == model.raw

    def test_a_link_that_has_expired(self, hub, direct, model, contents):
        hub.clear()
        hub.fault(weights, status=403)
        assert contents(direct) == model.raw
        assert [asked.host for asked in hub.asked].count("hub") == 1

    def test_nobody_there(self, hub, model, open_hub, free_port):
        with pytest.raises(SourceError, match=r"no answer from 127\.0\.0\.1.*Connection refused"):
            open_hub("org/name", no_cache=True, endpoint=f"http://127.0.0.1:{free_port()}")

    def test_closing_ends_a_read(self, hub, direct, eventually):
        hub.rate = 50_000
        errors: list[Exception] = []

        def read() -> None:
            try:
                dict(direct)["l1.w0"].read_into(memoryview(bytearray(1 << 20)), 0, 1 << 20)
            except SourceError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: any(weights(asked) and asked.sent for asked in hub.asked))
        started = time.monotonic()
        direct.close()
        reader.join(5)
        assert not reader.is_alive()
        assert time.monotonic() - started < 3
        assert "the source was closed" in str(errors[0])


class TestFilesThatChange:
    @pytest.mark.parametrize(
        ("fault", "expected"),
        [
            ({"change": lambda data: data + b"x"}, r"its size was \d+ and is \d+"),
            ({"change": lambda data: data[:100]}, r"its size was \d+ and is 100"),
        ],
    )
    def test_its_size(self, hub, direct, fault, expected):
        hub.fault(weights, times=9, **fault)
        with pytest.raises(SourceError, match=rf"model-00001.* changed while.* {expected}"):
            first(direct).read_into(memoryview(bytearray(4)), 0, 4)

    def test_while_it_is_opened(self, hub, model, open_hub):
        long = lambda each: each.host == "cdn" and each.headers["Range"] != "bytes=0-63"  # noqa: E731
        hub.fault(long, times=9, change=lambda data: data + b"x")
        with pytest.raises(SourceError, match="changed while it was read") as caught:
            open_hub("org/name", no_cache=True)
        assert str(caught.value).count("hf://org/name@main: ") == 1

    def test_its_etag(self, hub, direct):
        hub.etag_suffix = "-other"
        with pytest.raises(SourceError, match=r"its ETag at 127\.0\.0\.1 was .* and is .*-other"):
            first(direct).read_into(memoryview(bytearray(4)), 0, 4)


class TestCoalescing:
    def test_a_hundred_small_tensors_are_one_request(self, hub, publish, open_hub, tmp_path):
        import torch

        tensors = {f"t{i:03}": torch.full((50,), i, dtype=torch.int16) for i in range(100)}
        save_file(tensors, tmp_path / "model.safetensors")
        publish({"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        source = open_hub("org/name", no_cache=True)
        hub.clear()
        for name, payload in source:
            data = bytearray(100)
            for start in range(0, 100, 50):
                payload.read_into(memoryview(data)[start : start + 50], start, start + 50)
            assert data == tensors[name].numpy().tobytes()
        assert len(hub.asked) == 1
