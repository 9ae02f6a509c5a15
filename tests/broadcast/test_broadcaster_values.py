"""Every value arrives, whatever its layout and dtype."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit_broadcaster import Rig
from kit_checks import both_modes
from streamer import TensorSpec, WeightSource

pytestmark = pytest.mark.timeout(60)


def tricky(random_tensor):
    """Cases 11 to 16: layouts and dtypes that have gone wrong somewhere."""
    grid = random_tensor(torch.float32, (6, 8), seed=1)
    half = random_tensor(torch.bfloat16, (4, 6), seed=2)
    fp8 = random_tensor(torch.float8_e4m3fn, (4, 6), seed=3)
    return {
        "empty.first": torch.zeros(0, 3),
        "u0": random_tensor(torch.uint8, (1,), seed=4),
        "u1": random_tensor(torch.uint8, (1,), seed=5),
        "u2": random_tensor(torch.uint8, (1,), seed=6),
        "bf16": half,
        "h0": random_tensor(torch.float16, (1,), seed=7),
        "h1": random_tensor(torch.float16, (1,), seed=8),
        "h2": random_tensor(torch.float16, (1,), seed=9),
        "f32": random_tensor(torch.float32, (1,), seed=10),
        "scalar": torch.tensor(2.5),
        "transposed": grid.t(),
        "columns": grid[:, ::2],
        "one column": grid[:, 3:4],
        "expanded": grid[:1, :4].expand(4, 4),
        "fp8.t": fp8.t(),
        "fp8.columns": fp8[:, ::2],
        "e5m2": random_tensor(torch.float8_e5m2, (5,), seed=11),
        "e8m0": random_tensor(torch.float8_e8m0fnu, (5,), seed=12),
        "fp4": random_tensor(torch.float4_e2m1fn_x2, (5, 2), seed=13),
        "empty.middle": torch.zeros(2, 0, dtype=torch.int64),
        "bool": random_tensor(torch.bool, (7,), seed=14),
        "complex": random_tensor(torch.complex64, (3,), seed=15),
        "complex128": random_tensor(torch.complex128, (2,), seed=16),
        "int16": random_tensor(torch.int16, (3,), seed=17),
        "large": random_tensor(torch.uint8, (333,), seed=18),
        "int64": random_tensor(torch.int64, (2, 2), seed=19),
        "empty.last": torch.zeros(0, dtype=torch.complex64),
    }


@both_modes
@pytest.mark.parametrize("kind", ["tensors", "deferred"])
@pytest.mark.parametrize("buffer_size", [1, 16, 64, 1 << 20])
@pytest.mark.parametrize("call_size", [1, 8 << 30])
def test_every_layout_and_dtype_arrives_bit_for_bit(
    rig, expect, make_source, deferred, random_tensor, packed, kind, buffer_size, call_size
):
    one = rig(packed=packed, buffer_size=buffer_size, call_size=call_size, workers=2)
    tensors = tricky(random_tensor)
    pairs = tensors if kind == "tensors" else {n: deferred(t) for n, t in tensors.items()}
    plan = one.sync(make_source(pairs))
    expect(one, tensors)
    sizes = [n for n in one.group.log if n]
    if packed:
        assert sizes == [chunk.nbytes for chunk in plan.chunks if chunk.nbytes]
    else:
        assert sizes == [t.nbytes for t in tensors.values() if t.numel()]


@both_modes
def test_lazy_conjugates_and_negations_arrive_as_values(rig, make_source, packed):
    """Case 16."""
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    one = rig(packed=packed)
    one.sync(make_source({"conj": x.conj(), "imag": x.conj().imag}))
    (worker,) = one.workers
    conj = torch.frombuffer(bytearray(worker.tensors["conj"][2]), dtype=torch.complex64)
    imag = torch.frombuffer(bytearray(worker.tensors["imag"][2]), dtype=torch.float32)
    assert conj.tolist() == [1 - 2j, 3 + 4j]
    assert imag.tolist() == [-2.0, 4.0]


@both_modes
@pytest.mark.parametrize("where", ["first", "middle", "last", "alone"])
def test_both_sides_agree_on_an_empty_tensor(rig, expect, make_source, packed, where):
    """Case 14."""
    empty, full = {"none": torch.zeros(0, 4)}, {"a": torch.ones(5), "b": torch.ones(6)}
    tensors = {
        "first": {**empty, **full},
        "middle": {"a": full["a"], **empty, "b": full["b"]},
        "last": {**full, **empty},
        "alone": empty,
    }[where]
    one = rig(packed=packed, buffer_size=16, workers=2)
    for _ in range(2):
        one.sync(make_source(tensors))
        expect(one, tensors)


@both_modes
def test_views_of_one_buffer_that_is_overwritten_on_the_next_step(rig, packed):
    """Case 18: a payload is borrowed until the iterator is advanced, and no longer."""
    shared = torch.zeros(8)

    class Reusing(WeightSource):
        def specs(self):
            return [TensorSpec(f"t{i}", torch.float32, (8,)) for i in range(20)]

        def __iter__(self):
            for i in range(20):
                shared.fill_(float(i))
                yield f"t{i}", shared
                shared.fill_(-1.0)

    one = rig(packed=packed, buffer_size=40)
    one.sync(Reusing())
    (worker,) = one.workers
    for i in range(20):
        data = torch.frombuffer(bytearray(worker.tensors[f"t{i}"][2]), dtype=torch.float32)
        assert data.eq(i).all()


@both_modes
def test_progress_is_told_on_the_pushing_thread(rig, make_source, packed):
    told: list[tuple[int, str]] = []
    one = rig(packed=packed, buffer_size=16)
    plan = one.sync(
        make_source({f"t{i}": torch.zeros(3) for i in range(7)}),
        on_progress=lambda n: told.append((n, threading.current_thread().name)),
    )
    sizes = list(itertools.accumulate(chunk.nbytes for chunk in plan.chunks))
    assert told == [(size, threading.current_thread().name) for size in sizes]


# Whatever the specs and sizes.


@st.composite
def weights(draw):
    dtypes = st.sampled_from(
        [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
    )
    shapes = st.one_of(st.just(()), st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    return draw(st.lists(st.tuples(dtypes, shapes, st.booleans()), min_size=1, max_size=15))


@settings(max_examples=60)
@given(
    weights(),
    st.booleans(),
    st.one_of(st.integers(1, 64), st.integers(1, 500)),
    st.sampled_from([1, 50, 8 << 30]),
    st.integers(1, 4),
    st.sampled_from([7, 1 << 20]),
)
def test_random_weights_arrive(
    make_source, deferred, random_tensor, bytes_of, entries, packed, buffer_size, call_size,
    num_buffers, slot,
):  # fmt: skip
    tensors = {
        f"t{i}": random_tensor(dtype, shape, seed=i) for i, (dtype, shape, _) in enumerate(entries)
    }
    pairs = {
        name: deferred(tensor) if late else tensor
        for (name, tensor), (_, _, late) in zip(tensors.items(), entries, strict=True)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamer.broadcast.fill.SLOT_SIZE", slot)
        one = Rig(
            packed=packed,
            buffer_size=buffer_size,
            call_size=call_size,
            num_buffers=num_buffers,
            threads=2,
        )
        try:
            one.sync(make_source(pairs))
            (worker,) = one.workers
            assert worker.tensors == {
                name: (tensor.dtype, tuple(tensor.shape), bytes_of(tensor))
                for name, tensor in tensors.items()
            }
        finally:
            one.close()
