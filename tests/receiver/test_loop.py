"""The receive loop: it refuses before it receives, and once it receives it receives to the end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from streamer import PlanError, StreamerError, TensorSpec, TransportError
from streamer.receiver.loop import Layout, parse_update, receive
from streamer.testing.loopback import LoopbackGroup

pytestmark = pytest.mark.timeout(30)


def update(names=("a",), dtype_names=("float32",), shapes=((2, 3),)):
    return {
        "names": list(names),
        "dtype_names": list(dtype_names),
        "shapes": [list(shape) if isinstance(shape, tuple) else shape for shape in shapes],
    }


def test_an_update_lists_specs():
    info = update(
        ("w", "scale", "none", "q", "p"),
        ("bfloat16", "float32", "int8", "float8_e4m3fn", "float4_e2m1fn_x2"),
        ((2, 3), (), (0, 7), (5,), (5, 1)),
    )
    assert parse_update(info) == [
        TensorSpec("w", torch.bfloat16, (2, 3)),
        TensorSpec("scale", torch.float32, ()),
        TensorSpec("none", torch.int8, (0, 7)),
        TensorSpec("q", torch.float8_e4m3fn, (5,)),
        TensorSpec("p", torch.float4_e2m1fn_x2, (5, 1)),
    ]
    assert parse_update(update((), (), ())) == []
    assert len(parse_update({**update(), "chunk_sizes": [24]})) == 1


LISTS = "update_info needs names, dtype_names and shapes, lists of one length"


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, LISTS),
        ({"names": ["a"]}, LISTS),
        ({**update(), "names": "a"}, LISTS),
        ({**update(), "names": {"a": 1}}, LISTS),
        ({**update(), "shapes": None}, LISTS),
        (update(("a", "b")), LISTS),
        (update(shapes=((1,), (2,))), LISTS),
        (update(dtype_names=("float12",)), "tensor 'a': torch has no dtype 'float12'"),
        (update(dtype_names=("torch.float32",)), "torch has no dtype 'torch.float32'"),
        (update(dtype_names=("nn",)), "torch has no dtype 'nn'"),
        (update(dtype_names=("__doc__",)), "torch has no dtype '__doc__'"),
        (update(dtype_names=(7,)), "torch has no dtype 7"),
        (update(dtype_names=(None,)), "torch has no dtype None"),
        (update(names=(7,)), "7"),
        (update(names=(None,)), "None"),
        (update(shapes=((2, -1),)), "tensor a: [2, -1] is not a shape"),
        (update(shapes=((2.0,),)), "tensor a: [2.0] is not a shape"),
        (update(shapes=((True,),)), "tensor a: [True] is not a shape"),
        (update(shapes=(("2",),)), "tensor a: ['2'] is not a shape"),
        (update(shapes=(6,)), "tensor a: 6 is not a shape"),
        (update(shapes=(None,)), "tensor a: None is not a shape"),
    ],
)
def test_a_malformed_update_is_refused(info, message):
    with pytest.raises(PlanError) as caught:
        parse_update(info)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


class Sender:
    """Rank 0: broadcasts ``pieces`` and tells how far it came."""

    def __init__(self, pieces):
        self.group = LoopbackGroup(2)
        self.transport = self.group.transport(0)
        self.sent = 0
        self.error: Exception | None = None
        self.pieces = pieces
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            for piece in self.pieces:
                self.transport.broadcast(piece, 10)
                self.sent += 1
        except Exception as error:
            self.error = error

    def end(self):
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def sender():
    made: list[Sender] = []

    def make(pieces):
        made.append(Sender(pieces))
        return made[-1]

    yield make
    for one in made:
        one.transport.close()
        one.end()


def specs_of(count, size=10):
    return [TensorSpec(f"t{i}", torch.uint8, (size,)) for i in range(count)]


def run(sender, specs, sink, *, packed=True, buffer_size=19, chunk_sizes=None, timeout=10):
    receive(
        sender.group.transport(1),
        Layout.of(specs, packed=packed, buffer_size=buffer_size, chunk_sizes=chunk_sizes),
        allocate=lambda n: torch.empty(n, dtype=torch.uint8),
        sink=sink,
        timeout=timeout,
    )


def test_chunks_come_as_views_of_their_buffer(sender):
    one = sender([torch.arange(20, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)])
    chunks = []
    run(one, specs_of(3), chunks.append, chunk_sizes=[20, 10])
    assert [[name for name, _ in chunk] for chunk in chunks] == [["t0", "t1"], ["t2"]]
    first, second = (tensor for _, tensor in chunks[0])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.tolist() == list(range(10))
    assert second.tolist() == list(range(10, 20))
    assert chunks[1][0][1].tolist() == list(range(10))


def test_per_tensor_each_comes_alone(sender):
    one = sender([torch.ones(10, dtype=torch.uint8)] * 3)
    chunks = []
    run(one, specs_of(3), chunks.append, packed=False)
    assert [[name for name, _ in chunk] for chunk in chunks] == [["t0"], ["t1"], ["t2"]]


@pytest.mark.parametrize("packed", [True, False])
def test_an_empty_update_receives_nothing(sender, packed):
    one = sender([])
    run(one, [], lambda chunk: pytest.fail("nothing to sink"), packed=packed)


@pytest.mark.parametrize(
    ("chunk_sizes", "message"),
    [
        ([30], "the sender cuts 1 chunks of 30 bytes, this worker expects 2 of 30 with a buffer of"
               " 19 bytes: nothing was received"),
        ([10, 10, 10], "the sender cuts 3 chunks of 30 bytes, this worker expects 2 of 30"),
        ([20, 9], "the sender cuts 2 chunks of 29 bytes, this worker expects 2 of 30"),
        ([], "the sender cuts 0 chunks of 0 bytes"),
    ],
)  # fmt: skip
def test_other_chunks_than_the_sender_s_are_refused_before_anything(sender, chunk_sizes, message):
    """Case 8: 64 against 128 bytes must be found out, and must not hang."""
    one = sender([])
    with pytest.raises(PlanError) as caught:
        run(one, specs_of(3), lambda chunk: pytest.fail("received"), chunk_sizes=chunk_sizes)
    assert message in str(caught.value)
    assert one.group.barrier.n_waiting == 0


@pytest.mark.parametrize("chunk_sizes", ["twenty", ["20", "10"], 30, [None], {"a": 1}])
def test_chunk_sizes_that_are_none_are_refused(sender, chunk_sizes):
    with pytest.raises(PlanError):
        run(sender([]), specs_of(3), lambda chunk: None, chunk_sizes=chunk_sizes)


def test_per_tensor_sizes_of_staging_do_not_matter(sender):
    one = sender([torch.ones(10, dtype=torch.uint8)] * 3)
    run(one, specs_of(3), lambda chunk: None, packed=False, chunk_sizes=[266])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    ("error", "message"),
    [(PlanError("no such parameter: t1"), "no such parameter: t1"),
     (KeyError("t1"), "KeyError: 't1'")],
)  # fmt: skip
def test_a_sink_that_fails_still_receives_the_rest(sender, packed, index, error, message):
    count = 8
    pieces = [torch.ones(20, dtype=torch.uint8)] * 4
    if not packed:
        pieces, index = [torch.ones(10, dtype=torch.uint8)] * count, 2 * index + 1
    one = sender(pieces)
    sunk = []

    def sink(chunk):
        sunk.append(chunk)
        if len(sunk) == index + 1:
            raise error

    with pytest.raises(StreamerError) as caught:
        run(one, specs_of(count), sink, packed=packed)
    assert str(caught.value) == message
    one.end()
    assert (one.sent, one.error) == (len(pieces), None)
    assert len(sunk) == index + 1, "what comes after a failure is thrown away"
    assert caught.value is error or caught.value.__cause__ is error


def test_a_sender_that_goes_is_an_error(sender):
    one = sender([torch.ones(20, dtype=torch.uint8)])
    started = time.monotonic()
    leaving = threading.Timer(0.3, one.transport.close)
    leaving.start()
    with pytest.raises(TransportError):
        run(one, specs_of(4), lambda chunk: None)
    assert time.monotonic() - started < 5
    leaving.join()


def test_a_tensor_that_starts_misaligned_does_not_leave_the_sender_waiting(sender):
    """Another sender than ours may list such an order: ours aligns every tensor."""
    specs = [
        TensorSpec("odd", torch.uint8, (3,)),
        TensorSpec("wide", torch.float32, (2,)),
        TensorSpec("more", torch.uint8, (30,)),
        TensorSpec("last", torch.uint8, (30,)),
    ]
    wide = torch.tensor([1.5, -2.0])
    first = torch.cat([torch.ones(3, dtype=torch.uint8), wide.view(torch.uint8)])
    rest = torch.zeros(30, dtype=torch.uint8)
    one = sender([torch.cat([first, rest]), rest])
    got = {}
    try:
        run(one, specs, lambda chunk: got.update(chunk), buffer_size=20)
    except StreamerError as error:
        assert "wide" in str(error)  # noqa: PT017
    else:
        assert got["wide"].tolist() == [1.5, -2.0]
    one.thread.join(3)
    assert not one.thread.is_alive()
