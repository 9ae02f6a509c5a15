"""The plan, against a naive copy of what vLLM's receiver does with the lists it is sent."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from streamer import PlanError, TensorSpec, make_plan
from streamer.plan import Call, Plan, packed_boundaries

DTYPES = {
    1: (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float4_e2m1fn_x2),
    2: (torch.bfloat16, torch.int16),
    4: (torch.float32,),
    8: (torch.int64, torch.complex64),
    16: (torch.complex128,),
}


@dataclass
class Received:
    """A chunk as the receiver sees it: names, and where each starts in it."""

    names: list[str]
    offsets: list[int]
    nbytes: int


def consume(update_info: dict, buffer_size: int) -> list[Received]:
    """What vLLM's ``packed_nccl_broadcast_consumer`` makes of one call, said anew.

    It sees nothing but names, dtypes and shapes, adds up sizes, and closes a chunk after the tensor
    that makes it strictly larger than the buffer; what is left is a last chunk.
    """
    chunks: list[Received] = []
    names: list[str] = []
    offsets: list[int] = []
    size = 0
    for name, dtype, shape in zip(
        update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True
    ):
        names.append(name)
        offsets.append(size)
        size += math.prod(shape) * getattr(torch, dtype).itemsize
        if size > buffer_size:
            chunks.append(Received(names, offsets, size))
            names, offsets, size = [], [], 0
    if names:
        chunks.append(Received(names, offsets, size))
    return chunks


def listed(call: Call) -> dict:
    """What goes over HTTP for a call."""
    specs = call.wire_specs()
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype_name for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def planned_specs(plan: Plan) -> list[TensorSpec]:
    return [spec for call in plan.calls for chunk in call.chunks for spec in chunk.specs]


@st.composite
def specs_lists(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> list[TensorSpec]:
    dtypes = st.sampled_from([dtype for size in sizes for dtype in DTYPES[size]])
    shapes = st.one_of(
        st.just(()),
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
        st.integers(0, 200).map(lambda n: (n,)),
    )
    pairs = draw(st.lists(st.tuples(dtypes, shapes), max_size=40))
    return [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)]


BUFFERS = st.one_of(st.integers(1, 64), st.integers(1, 2000))
CALLS = st.one_of(st.just(8 << 30), st.integers(1, 2000))


@given(specs_lists(), BUFFERS, CALLS)
@example([TensorSpec("a", torch.uint8, (3,)), TensorSpec("b", torch.bfloat16, (9,))], 4, 8 << 30)
@example([TensorSpec("a", torch.uint8, (3,)), TensorSpec("b", torch.float32, ())], 3, 8 << 30)
@example([TensorSpec("a", torch.uint8, (1,)), TensorSpec("e", torch.complex128, (0,))], 1, 1)
def test_the_receiver_cuts_the_chunks_that_are_planned(specs, buffer_size, call_size):
    plan = make_plan(specs, buffer_size=buffer_size, call_size=call_size)
    for call in plan.calls:
        received = consume(listed(call), buffer_size)
        assert [chunk.nbytes for chunk in received] == [chunk.nbytes for chunk in call.chunks]
        for theirs, ours in zip(received, call.chunks, strict=True):
            assert theirs.names == [spec.name for spec, _ in ours.wire_order()]
            assert theirs.offsets == [offset for _, offset in ours.wire_order()]


@given(specs_lists(), BUFFERS, CALLS)
def test_every_tensor_starts_aligned_in_its_chunk(specs, buffer_size, call_size):
    """Cases 11 and 14: an empty tensor at an odd offset makes the receiver raise, too."""
    plan = make_plan(specs, buffer_size=buffer_size, call_size=call_size)
    for call in plan.calls:
        items = {spec.name: spec.dtype.itemsize for spec in call.wire_specs()}
        for chunk in consume(listed(call), buffer_size):
            for name, offset in zip(chunk.names, chunk.offsets, strict=True):
                assert offset % items[name] == 0, name


@given(specs_lists(), BUFFERS, CALLS, st.booleans())
def test_each_tensor_is_sent_once_in_contiguous_runs(specs, buffer_size, call_size, packed):
    """Staged in the order of the iterator: one open chunk is enough to fill."""
    plan = make_plan(specs, packed=packed, buffer_size=buffer_size, call_size=call_size)
    assert planned_specs(plan) == specs
    for chunk in plan.chunks:
        assert sorted(chunk.order) == list(range(len(chunk.specs)))
        assert len(chunk.offsets) == len(chunk.specs) > 0
    for call in plan.calls:
        names = [spec.name for spec in call.wire_specs()]
        assert sorted(names) == sorted(s.name for chunk in call.chunks for s in chunk.specs)


@given(specs_lists(), BUFFERS, CALLS)
def test_packed_chunks_hold_no_padding_and_no_split_tensor(specs, buffer_size, call_size):
    plan = make_plan(specs, buffer_size=buffer_size, call_size=call_size)
    for chunk in plan.chunks:
        position = 0
        for spec, offset in chunk.wire_order():
            assert offset == position
            position += spec.nbytes
        assert position == chunk.nbytes


@given(specs_lists(), BUFFERS, CALLS, st.booleans())
def test_sizes_are_bounded_and_add_up(specs, buffer_size, call_size, packed):
    plan = make_plan(specs, packed=packed, buffer_size=buffer_size, call_size=call_size)
    largest = max((spec.nbytes for spec in specs), default=0)
    assert plan.tensors == len(specs)
    assert plan.nbytes == sum(spec.nbytes for spec in specs)
    assert sum(call.nbytes for call in plan.calls) == plan.nbytes
    assert plan.largest_chunk == max((chunk.nbytes for chunk in plan.chunks), default=0)
    assert plan.largest_chunk <= buffer_size + largest
    for call in plan.calls:
        assert sum(chunk.nbytes for chunk in call.chunks) < call_size + buffer_size + largest
        before_last = sum(chunk.nbytes for chunk in call.chunks[:-1])
        assert before_last < call_size
    assert plan.broadcasts == (len(plan.chunks) if packed else len(specs))
    assert plan.packed is packed
    assert plan.buffer_size == buffer_size


@given(specs_lists(), BUFFERS, CALLS)
def test_per_tensor_never_reorders_and_stages_apart(specs, buffer_size, call_size):
    plan = make_plan(specs, packed=False, buffer_size=buffer_size, call_size=call_size)
    assert [spec for call in plan.calls for spec in call.wire_specs()] == specs
    for chunk in plan.chunks:
        end = 0
        for spec, offset in chunk.wire_order():
            assert offset % spec.dtype.itemsize == 0
            assert offset >= end
            end = offset + spec.nbytes
        assert end == chunk.nbytes
        if len(chunk.specs) > 1:
            assert chunk.nbytes <= buffer_size


@given(specs_lists(), BUFFERS)
def test_packed_chunks_are_full(specs, buffer_size):
    """Only the last chunk of a call may be short, and a call that ends early ends for alignment."""
    plan = make_plan(specs, buffer_size=buffer_size)
    for call in plan.calls:
        assert all(chunk.nbytes > buffer_size for chunk in call.chunks[:-1])
    for call, following in itertools.pairwise(plan.calls):
        last, first = call.chunks[-1], following.chunks[0].specs[0]
        assert last.nbytes + first.nbytes > buffer_size
        assert last.nbytes % first.dtype.itemsize


@given(specs_lists(sizes=(2, 4)), BUFFERS)
def test_one_call_is_enough_unless_something_is_misaligned(specs, buffer_size):
    aligned = [spec for spec in specs if spec.nbytes % 4 == 0]
    assert len(make_plan(aligned, buffer_size=buffer_size).calls) == (1 if aligned else 0)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_boundaries_are_those_of_the_receiver(sizes, buffer_size):
    info = {
        "names": [str(i) for i in range(len(sizes))],
        "dtype_names": ["uint8"] * len(sizes),
        "shapes": [[size] for size in sizes],
    }
    ends, count = [], 0
    for chunk in consume(info, buffer_size):
        count += len(chunk.names)
        ends.append(count)
    assert packed_boundaries(sizes, buffer_size) == ends


def chunks_of(plan: Plan) -> list[list[list[str]]]:
    """Names on the wire, by chunk, by call."""
    return [
        [[spec.name for spec, _ in chunk.wire_order()] for chunk in call.chunks]
        for call in plan.calls
    ]


def spec(name: str, dtype: torch.dtype, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def test_the_buffer_size_decides_the_chunks():
    """Case 8: the same tensors with 64 and with 128 bytes."""
    specs = [spec(f"t{i}", torch.float32, 8) for i in range(8)]
    assert [chunk.nbytes for chunk in make_plan(specs, buffer_size=64).chunks] == [96, 96, 64]
    assert [chunk.nbytes for chunk in make_plan(specs, buffer_size=128).chunks] == [160, 96]


def test_exactly_full_does_not_close():
    specs = [spec(f"t{i}", torch.uint8, 8) for i in range(4)]
    assert chunks_of(make_plan(specs, buffer_size=16)) == [[["t0", "t1", "t2"], ["t3"]]]
    assert chunks_of(make_plan(specs[:2], buffer_size=16)) == [[["t0", "t1"]]]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["big", "s0", "s1"], [[["big"], ["s0", "s1"]]]),
        (["s0", "big", "s1"], [[["s0", "big"], ["s1"]]]),
        (["s0", "s1", "big"], [[["s0", "s1", "big"]]]),
        (["big"], [[["big"]]]),
    ],
)
def test_a_tensor_larger_than_the_buffer_ends_one_chunk(order, expected):
    """Case 10: a buffer of 16 bytes, a tensor of 64."""
    sizes = {"big": 64, "s0": 4, "s1": 4}
    specs = [spec(name, torch.uint8, sizes[name]) for name in order]
    assert chunks_of(make_plan(specs, buffer_size=16)) == expected


def test_larger_items_come_first_in_a_chunk():
    """Case 11: three float16 then a float32 would start the latter at 6."""
    specs = [spec(f"h{i}", torch.float16, 1) for i in range(3)] + [spec("f", torch.float32, 1)]
    (chunk,) = make_plan(specs).chunks
    assert [(s.name, at) for s, at in chunk.wire_order()] == [
        ("f", 0),
        ("h0", 4),
        ("h1", 6),
        ("h2", 8),
    ]
    specs = [spec(f"u{i}", torch.uint8, 1) for i in range(3)] + [spec("b", torch.bfloat16, 1)]
    (chunk,) = make_plan(specs).chunks
    assert [(s.name, at) for s, at in chunk.wire_order()] == [
        ("b", 0),
        ("u0", 2),
        ("u1", 3),
        ("u2", 4),
    ]


def test_a_closing_tensor_that_would_be_misaligned_starts_a_call():
    """It must stay last in its chunk, where it would start at 3."""
    specs = [spec("u", torch.uint8, 3), spec("b", torch.bfloat16, 9)]
    assert chunks_of(make_plan(specs, buffer_size=4)) == [[["u"]], [["b"]]]


def test_equal_items_keep_their_order():
    specs = [spec(f"t{i}", torch.bfloat16, i % 3) for i in range(9)]
    assert chunks_of(make_plan(specs)) == [[[s.name for s in specs]]]


@pytest.mark.parametrize("packed", [True, False])
def test_a_scalar_is_one_item(packed):
    """Case 13."""
    plan = make_plan([spec("scale", torch.float32)], packed=packed)
    (call,) = plan.calls
    assert listed(call) == {"names": ["scale"], "dtype_names": ["float32"], "shapes": [[]]}
    assert plan.nbytes == plan.largest_chunk == 4


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("empty", [0, 1, 2, "alone"])
def test_an_empty_tensor_is_listed(packed, empty):
    """Case 14. Alone it is a chunk of no bytes, which no side broadcasts."""
    specs = [spec("a", torch.uint8, 3), spec("b", torch.uint8, 5)]
    if empty == "alone":
        specs = []
        empty = 0
    specs.insert(empty, spec("none", torch.float32, 4, 0))
    plan = make_plan(specs, packed=packed)
    assert planned_specs(plan) == specs
    assert {name for call in plan.calls for name in listed(call)["names"]} == {
        s.name for s in specs
    }
    assert plan.nbytes == sum(s.nbytes for s in specs)


def test_an_empty_tensor_after_an_exact_end_is_not_lost():
    specs = [spec("a", torch.uint8, 17), spec("none", torch.float32, 0)]
    plan = make_plan(specs, buffer_size=16)
    assert chunks_of(plan) == [[["a"], ["none"]]]
    assert [chunk.nbytes for chunk in plan.chunks] == [17, 0]


def test_a_call_ends_once_it_is_large_enough():
    specs = [spec(f"t{i}", torch.uint8, 10) for i in range(6)]
    plan = make_plan(specs, buffer_size=9, call_size=20)
    assert chunks_of(plan) == [
        [["t0"], ["t1"]],
        [["t2"], ["t3"]],
        [["t4"], ["t5"]],
    ]


def test_nothing_to_plan():
    plan = make_plan([])
    assert plan.calls == ()
    assert (plan.tensors, plan.nbytes, plan.largest_chunk, plan.broadcasts) == (0, 0, 0, 0)


@pytest.mark.parametrize("packed", [True, False])
def test_a_name_that_comes_twice_is_refused(packed):
    specs = [spec("a", torch.uint8, 1), spec("b", torch.uint8, 1), spec("a", torch.uint8, 2)]
    with pytest.raises(PlanError, match="tensor a is in the source twice"):
        make_plan(specs, packed=packed)


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_holds_something(size):
    with pytest.raises(PlanError, match="buffer size must be at least 1 byte"):
        make_plan([spec("a", torch.uint8, 1)], buffer_size=size)


@pytest.mark.parametrize("packed", [True, False])
def test_a_hundred_thousand_tensors(packed):
    dtypes = [dtype for group in DTYPES.values() for dtype in group]
    specs = [spec(f"t{i}", dtypes[i % len(dtypes)], i % 97, 3) for i in range(100_000)]
    plan = make_plan(specs, packed=packed, buffer_size=1 << 16)
    assert plan.tensors == 100_000
    assert planned_specs(plan) == specs
    if packed:
        for call in plan.calls:
            assert [c.nbytes for c in consume(listed(call), 1 << 16)] == [
                c.nbytes for c in call.chunks
            ]


@pytest.mark.parametrize("shape", [(2**62,), (2**70,), (2**40, 2**40)])
def test_what_no_device_can_hold_is_refused(shape):
    with pytest.raises(PlanError, match=r"tensor w: no device has the .* bytes of shape"):
        make_plan([TensorSpec("w", torch.float32, shape)])


@pytest.mark.parametrize(
    "spec",
    [
        ("w", torch.float32, (1,)),
        None,
        TensorSpec(1, torch.float32, (1,)),
        TensorSpec(b"w", torch.float32, (1,)),
        TensorSpec("\ud800", torch.float32, (1,)),
        TensorSpec("w", "float32", (1,)),
        TensorSpec("w", torch.float32, [2, 3]),
        TensorSpec("w", torch.float32, (2.0, 3)),
        TensorSpec("w", torch.float32, (-2, 3)),
        TensorSpec("w", torch.float32, 5),
        TensorSpec("w", torch.float32, (True, 4)),
    ],
    ids=repr,
)
def test_what_is_no_spec_is_named(spec):
    with pytest.raises(PlanError, match="is no spec"):
        make_plan([TensorSpec("good", torch.float32, ()), spec])
