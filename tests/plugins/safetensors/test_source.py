"""Reading: the right bytes from many threads, afresh every time, or an error that says why not."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from streamer_safetensors import SafetensorsSource
from streamer_safetensors.header import _DTYPES

import streamer
from streamer import SourceError
from streamer.registry import Registry


def read(tensor: streamer.Payload, nbytes: int) -> bytes:
    assert isinstance(tensor, streamer.DeferredTensor)
    data = bytearray(nbytes)
    tensor.read_into(memoryview(data), 0, nbytes)
    return bytes(data)


def contents(source: streamer.WeightSource) -> dict[str, bytes]:
    sizes = {spec.name: spec.nbytes for spec in source.specs()}
    return {name: read(tensor, sizes[name]) for name, tensor in source}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One tensor of 4000 bytes, 0 to 999 in order."""
    save_file({"w": torch.arange(1000, dtype=torch.int32)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def source(path: Path) -> Iterator[SafetensorsSource]:
    with closing(SafetensorsSource(path)) as source:
        yield source


class TestRegistered:
    def test_by_scheme_and_by_path(self, path):
        for name in (f"safetensors://{path}", f"SAFETENSORS://{path}", str(path), path):
            with closing(streamer.open_source(name)) as source:
                assert isinstance(source, SafetensorsSource)

    def test_the_plugin_alone(self):
        import streamer_safetensors

        registry = Registry()
        registry.add(streamer_safetensors)
        (entry,) = registry.entries.values()
        assert entry.scheme == "safetensors"
        assert "checkpoint folder" in entry.summary

    def test_unknown_options_are_refused(self, path):
        with pytest.raises(streamer.UsageError):
            streamer.open_source(str(path), revision="main")

    def test_it_does_not_name_a_version(self, source):
        assert source.weight_version is None


class TestRoundTrip:
    @pytest.fixture(scope="module")
    @staticmethod
    def scratch(tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("round-trip") / "m.safetensors"

    @pytest.fixture(scope="module")
    @staticmethod
    def pool() -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(4) as pool:
            yield pool

    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(
        tensors=st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.tuples(
                st.sampled_from(list(_DTYPES.values())),
                st.lists(st.integers(0, 5), max_size=3),
            ),
            min_size=1,
            max_size=6,
        ).filter(lambda tensors: "__metadata__" not in tensors),
        seed=st.integers(0, 2**32),
    )
    def test_any_tensors_in_any_pieces_from_any_thread(self, scratch, pool, tensors, seed):
        rng = random.Random(seed)
        expected: dict[str, bytes] = {}
        saved: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in tensors.items():
            count = torch.Size(shape or [1]).numel()
            expected[name] = rng.randbytes(count * dtype.itemsize)
            raw = torch.tensor(list(expected[name]), dtype=torch.uint8)
            scalar = not shape and dtype != torch.float4_e2m1fn_x2
            saved[name] = raw.view(dtype).reshape(() if scalar else shape or (1,))
        save_file(saved, scratch)
        with closing(SafetensorsSource(scratch)) as source:
            specs = {spec.name: spec for spec in source.specs()}
            assert {(name, spec.dtype, spec.shape) for name, spec in specs.items()} == {
                (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()
            }
            assert [name for name, _ in source] == list(specs)
            found = {name: bytearray(spec.nbytes) for name, spec in specs.items()}
            reads = []
            for name, tensor in source:
                size = specs[name].nbytes
                cuts = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 4)))})
                for start, stop in pairwise(cuts):
                    view = memoryview(found[name])[start:stop]
                    reads.append((tensor.read_into, view, start, stop))
            rng.shuffle(reads)
            for job in [pool.submit(*each) for each in reads]:
                job.result()
        assert found == expected

    def test_a_large_tensor_from_many_threads_at_once(self, tmp_path):
        values = torch.randint(0, 255, (8 << 20,), dtype=torch.uint8)
        save_file({"pad": torch.ones(3, dtype=torch.uint8), "w": values}, tmp_path / "m")
        with closing(SafetensorsSource(tmp_path / "m")) as source:
            tensor = dict(source)["w"]
            data = bytearray(8 << 20)
            barrier = threading.Barrier(8)

            def part(index: int) -> None:
                barrier.wait()
                for start in range(index << 16, len(data), 8 << 16):
                    view = memoryview(data)[start : start + (1 << 16)]
                    tensor.read_into(view, start, start + (1 << 16))

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(part, range(8)))
        assert data == values.numpy().tobytes()

    def test_short_reads_are_continued(self, source, monkeypatch):
        whole = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, to, at: whole(fd, [to[0][:7]], at))
        assert contents(source)["w"] == torch.arange(1000, dtype=torch.int32).numpy().tobytes()


class TestPasses:
    def test_every_pass_is_fresh(self, source):
        first, second = iter(source), iter(source)
        assert next(first)[0] == next(second)[0] == "w"
        assert list(first) == []
        assert len(list(source)) == 1
        assert source.specs() is source.specs()

    def test_tensors_outlive_the_step_that_gave_them(self, tmp_path):
        save_file({name: torch.tensor([ord(name)]) for name in "abc"}, tmp_path / "m")
        with closing(SafetensorsSource(tmp_path / "m")) as source:
            pairs = list(source)
            assert [read(tensor, 8)[0] for _, tensor in pairs] == [97, 98, 99]

    def test_files_are_closed(self, path):
        before = descriptors()
        source = SafetensorsSource(path)
        assert descriptors() == before + 1
        next(iter(source))
        abandoned = iter(source)
        next(abandoned)
        assert descriptors() == before + 1
        source.close()
        source.close()
        assert descriptors() == before

    def test_a_failed_opening_leaves_no_file_open(self, path):
        save_file({"v": torch.ones(1)}, path.with_name("a.safetensors"))
        path.with_name("z.safetensors").write_bytes(b"broken")
        before = descriptors()
        with pytest.raises(SourceError, match=r"z\.safetensors"):
            SafetensorsSource(path.parent)
        assert descriptors() == before

    def test_a_closed_source(self, path):
        source = SafetensorsSource(path)
        ((_, tensor),) = source
        source.close()
        with pytest.raises(SourceError, match=r"m\.safetensors: the source was closed"):
            next(iter(source))
        with pytest.raises(SourceError, match=r"tensor w from .*m\.safetensors.*was closed"):
            read(tensor, 4)

    def test_no_descriptors_left(self, path):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(path, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(SourceError, match=r"m\.safetensors: Too many open.*ulimit -n"):
                SafetensorsSource(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class TestFilesThatChange:
    """A file that changes after its header was checked is never read as if it had not."""

    REMEDY = "open the source again"

    def test_truncated_before_a_pass(self, path, source):
        size = path.stat().st_size
        os.truncate(path, size - 100)
        with pytest.raises(SourceError, match=rf"had {size} bytes and has {size - 100}") as caught:
            next(iter(source))
        assert path.name in str(caught.value)
        assert self.REMEDY in str(caught.value)

    def test_truncated_while_it_is_read(self, path, source):
        ((_, tensor),) = source
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(
            SourceError, match=r"m\.safetensors ended at byte \d+ inside tensor w.*truncated"
        ):
            read(tensor, 4000)

    def test_truncated_behind_what_is_read(self, path, source):
        ((_, tensor),) = source
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(SourceError, match=r"changed while tensor w was read"):
            read(tensor, 8)

    def test_rewritten_before_a_pass(self, path, source):
        rewrite(path)
        with pytest.raises(SourceError, match=r"m\.safetensors was rewritten in place since its h"):
            next(iter(source))

    def test_rewritten_while_it_is_read(self, path, source):
        ((_, tensor),) = source
        rewrite(path)
        with pytest.raises(SourceError, match=r"m\.safetensors was rewritten.* tensor w was read"):
            read(tensor, 4000)

    def test_replaced_before_a_pass(self, path, source):
        status = path.stat()
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(path)
        with pytest.raises(SourceError, match=r"m\.safetensors was replaced.*open the source"):
            next(iter(source))

    def test_removed_before_a_pass(self, path, source):
        path.unlink()
        with pytest.raises(SourceError, match=r"m\.safetensors is gone.*open the source again"):
            next(iter(source))

    @pytest.mark.parametrize("how", [Path.unlink, lambda path: path.with_name("b").replace(path)])
    def test_replaced_or_removed_during_a_pass_is_harmless(self, path, source, how):
        expected = contents(source)["w"]
        path.with_name("b").write_bytes(bytes(path.stat().st_size))
        ((_, tensor),) = source
        how(path)
        assert read(tensor, 4000) == expected

    def test_a_new_source_sees_the_new_weights(self, path, source):
        old = contents(source)["w"]
        save_file({"w": torch.zeros(1000, dtype=torch.int32)}, path.with_name("new"))
        path.with_name("new").replace(path)
        with closing(SafetensorsSource(path)) as again:
            assert contents(again)["w"] == bytes(4000)
        assert old != bytes(4000)

    def test_a_failing_disk(self, source, monkeypatch):
        def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
            raise OSError(5, "Input/output error")

        ((_, tensor),) = source
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(SourceError, match=r"tensor w from .*m\.safetensors: Input/output"):
            read(tensor, 8)


def rewrite(path: Path) -> None:
    """Other bytes in the same file, which keeps its size and gets a new time."""
    content = path.read_bytes()
    status = path.stat()
    with path.open("r+b") as file:
        file.write(content[:-4000] + bytes(4000))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
