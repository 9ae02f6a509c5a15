"""How buffers are filled: many tensors at once, by several threads, ahead; and used again."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kit_checks import PATIENCE, both_modes
from streamer import SourceError, TensorSpec, WeightSource
from streamer.broadcast.staging import Stage

pytestmark = pytest.mark.timeout(60)


@both_modes
@pytest.mark.parametrize("together", [1, 4, 256])
def test_a_lasting_source_is_copied_many_tensors_at_once(
    rig, expect, random_tensor, packed, together, monkeypatch
):
    monkeypatch.setattr("streamer.broadcast.producer._TOGETHER", together)
    tensors = {
        f"t{i}": random_tensor(dtype, (i % 5, 3))
        for i, dtype in enumerate([torch.bfloat16, torch.float32, torch.int64, torch.float16] * 9)
    }
    tensors["t40"] = random_tensor(torch.float32, (7, 3)).t()

    class Lasting(WeightSource):
        lasting = True

        def specs(self):
            return [TensorSpec(k, t.dtype, tuple(t.shape)) for k, t in tensors.items()]

        def __iter__(self):
            for name, tensor in tensors.items():
                yield name, tensor.clone() if tensor.is_contiguous() else tensor

    one = rig(packed=packed, buffer_size=600, workers=2)
    one.sync(Lasting())
    expect(one, tensors)


@pytest.mark.parametrize("worse", [False, True], ids=["copied one by one", "culprit"])
def test_a_copy_of_many_tensors_that_fails(rig, expect, make_source, monkeypatch, worse):
    """It does not say at which tensor."""
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(6)}
    tensors["t1"] = torch.zeros(0)  # has the place of the next one
    source = make_source(tensors)
    source.lasting = True

    def fail(*args):
        raise RuntimeError("CUDA error: made to fail\nmore")

    plain = Stage.add

    def add(self, fill, payload, *args):
        if worse and payload is source.pairs[2][1]:
            fail()
        plain(self, fill, payload, *args)

    monkeypatch.setattr(Stage, "add_all", fail)
    monkeypatch.setattr(Stage, "add", add)
    one = rig(buffer_size=1000)
    if worse:
        with pytest.raises(SourceError) as caught:
            one.sync(source)
        assert str(caught.value) == (
            "tensor t2 cannot be copied: RuntimeError: CUDA error: made to fail"
        )
    else:
        one.sync(source)
        expect(one, dict(source.pairs))


def test_a_lasting_source_is_taken_at_its_word(rig):
    """What shows that copies are put off: a source that wrongly says so sends wrong values."""
    shared = torch.zeros(2)

    class Lying(WeightSource):
        lasting = True

        def specs(self):
            return [TensorSpec(f"t{i}", torch.float32, (2,)) for i in range(4)]

        def __iter__(self):
            for i in range(4):
                yield f"t{i}", shared.fill_(float(i))

    one = rig(buffer_size=64)
    one.sync(Lying())
    (worker,) = one.workers
    last = bytes(torch.full((2,), 3.0).view(torch.uint8).tolist())
    assert [worker.tensors[f"t{i}"][2] for i in range(4)] == [last] * 4


@both_modes
def test_deferred_tensors_are_read_in_parts_by_several_threads(
    rig, expect, make_source, deferred, random_tensor, packed, monkeypatch
):
    monkeypatch.setattr("streamer.broadcast.fill.SLOT_SIZE", 50)
    together = threading.Barrier(3, timeout=PATIENCE)

    def meet(start, stop):
        if start < 150:
            together.wait()

    big = random_tensor(torch.int16, (400,), seed=1)
    payload = deferred(big, meet)
    small = random_tensor(torch.float32, (3,), seed=2)
    one = rig(packed=packed, buffer_size=900, threads=3)
    one.sync(make_source({"big": payload, "small": small}))
    expect(one, {"big": big, "small": small})
    assert sorted(payload.parts) == [(n, n + 50) for n in range(0, 800, 50)]
    assert len(payload.threads) == 3


def test_chunks_are_read_ahead_as_far_as_there_are_buffers(
    rig, make_source, deferred, random_tensor, eventually
):
    """The slow part of a chunk must not wait for the one before it to be sent."""
    reading: list[int] = []
    release = threading.Event()

    def pair(i):
        def wait(start, stop):
            reading.append(i)
            release.wait(PATIENCE)

        return f"t{i}", deferred(random_tensor(torch.uint8, (10,), seed=i), wait)

    one = rig(buffer_size=9, num_buffers=3, threads=8)
    source = make_source([pair(i) for i in range(8)])
    syncing = threading.Thread(target=one.sync, args=(source,))
    syncing.start()
    eventually(lambda: len(reading) == 3)
    time.sleep(0.2)
    assert sorted(reading) == [0, 1, 2]
    release.set()
    syncing.join(PATIENCE)
    assert sorted(reading) == list(range(8))
    assert one.workers[0].chunks == [[f"t{i}"] for i in range(8)]


def test_buffers_are_used_again(rig, expect, make_source, random_tensor):
    one = rig(buffer_size=64)
    seen = set()
    for seed in range(5):
        tensors = {f"t{i}": random_tensor(torch.int32, (9,), seed=10 * seed + i) for i in range(9)}
        one.sync(make_source(tensors))
        expect(one, tensors)
        seen.add(one.buffers())
    assert len(seen) == 1
    assert one.buffers()[1] == 3 * 256, "three chunks of 72 bytes, aligned"


def test_a_small_sync_first_does_not_leave_later_ones_with_little_memory(rig, make_source):
    one = rig(buffer_size=64, num_buffers=3)
    one.sync(make_source({"a": torch.zeros(20)}))
    assert one.buffers()[1] == 256
    one.sync(make_source({f"t{i}": torch.zeros(20) for i in range(9)}))
    assert one.buffers()[1] == 3 * 256
    one.sync(make_source({f"t{i}": torch.zeros(100) for i in range(9)}))
    assert one.buffers()[1] == 3 * 512
    kept = one.buffers()
    one.sync(make_source({"a": torch.zeros(1)}))
    assert one.buffers() == kept, "a smaller plan keeps what there is"
