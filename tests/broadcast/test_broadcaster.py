"""Rank 0's data path over the loopback transport, with our own receive loop at the other end."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer import (
    DeadlineExceeded,
    SourceError,
    SpecMismatch,
    StreamerError,
    TensorSpec,
    TransportError,
    WeightSource,
    make_plan,
)
from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.staging import Stage
from streamer.receiver.loop import Layout, parse_update, receive
from streamer.source import checked
from streamer.testing.loopback import LoopbackGroup

pytestmark = pytest.mark.timeout(60)

PATIENCE = 20


class Worker:
    """A rank that receives call after call and keeps the bytes by name."""

    def __init__(self, group, rank, packed, buffer_size):
        self.transport = group.transport(rank)
        self.packed, self.buffer_size = packed, buffer_size
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], bytes]] = {}
        self.chunks: list[list[str]] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while (item := self.calls.get()) is not None:
            update, answer = item
            try:
                receive(
                    self.transport,
                    Layout.of(
                        parse_update(json.loads(json.dumps(update))),
                        packed=self.packed,
                        buffer_size=self.buffer_size,
                        chunk_sizes=update["chunk_sizes"] if self.packed else None,
                    ),
                    allocate=lambda n: torch.full((n,), 0xAA, dtype=torch.uint8),
                    sink=self.keep,
                    timeout=PATIENCE,
                )
                answer.set_result(None)
            except Exception as error:
                answer.set_exception(error)

    def keep(self, tensors):
        self.chunks.append([name for name, _ in tensors])
        for name, tensor in tensors:
            data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
            self.tensors[name] = (tensor.dtype, tuple(tensor.shape), data)

    def receive(self, call) -> Future:
        specs = call.wire_specs()
        answer: Future = Future()
        update = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype_name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "chunk_sizes": [chunk.nbytes for chunk in call.chunks],
        }
        self.calls.put((update, answer))
        return answer


class Rig:
    """A trainer and its workers in one process."""

    def __init__(
        self,
        *,
        packed=True,
        buffer_size=64,
        call_size=8 << 30,
        workers=1,
        num_buffers=3,
        threads=3,
        progress=PATIENCE,
    ):
        self.packed, self.buffer_size, self.call_size = packed, buffer_size, call_size
        self.group = LoopbackGroup(1 + workers)
        self.transport = self.group.transport(0)
        self.workers = [
            Worker(self.group, rank, packed, buffer_size) for rank in range(1, 1 + workers)
        ]
        self.broadcaster = Broadcaster(
            self.transport, num_buffers=num_buffers, threads=threads, progress_timeout=progress
        )
        self.calls = 0
        self.on_call = lambda index: None
        self.begin = lambda: None

    def plan(self, source):
        return make_plan(
            source.specs(),
            packed=self.packed,
            buffer_size=self.buffer_size,
            call_size=self.call_size,
        )

    def sync(self, source, **options):
        """What a session does: every call is answered before the next is made."""
        plan = self.plan(source)
        specs = [spec for chunk in plan.chunks for spec in chunk.specs]

        def conduct(stream):
            self.begin()
            for index, call in enumerate(plan.calls):
                if stream.failure is not None:
                    return
                self.calls += 1
                self.on_call(index)
                answers = [worker.receive(call) for worker in self.workers]
                stream.send(call)
                for answer in answers:
                    answer.result(PATIENCE)

        with contextlib.closing(checked(source, specs)) as payloads:
            self.broadcaster.sync(plan, payloads, conduct, source=source, **options)
        return plan

    def buffers(self):
        memory = self.broadcaster._ring.memory
        return memory.data_ptr(), memory.numel()

    def close(self):
        self.transport.close()
        self.broadcaster.close()
        for worker in self.workers:
            worker.calls.put(None)
            worker.thread.join(PATIENCE)
            assert not worker.thread.is_alive()


@pytest.fixture
def rig(no_threads_left):
    made: list[Rig] = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def expect(bytes_of):
    """Every worker holds exactly these tensors."""

    def check(rig, tensors):
        expected = {
            name: (tensor.dtype, tuple(tensor.shape), bytes_of(tensor))
            for name, tensor in tensors.items()
        }
        for worker in rig.workers:
            assert worker.tensors == expected

    return check


both_modes = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


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
def test_a_lasting_source_is_copied_many_tensors_at_once(rig, expect, random_tensor, packed):
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

    one = rig(packed=packed, buffer_size=300, workers=2)
    one.sync(Lasting())
    expect(one, tensors)


@pytest.mark.parametrize("worse", [False, True], ids=["copied one by one", "culprit"])
def test_a_copy_of_many_tensors_that_fails(rig, expect, make_source, monkeypatch, worse):
    """It does not say at which tensor."""
    source = make_source({f"t{i}": torch.full((3,), float(i)) for i in range(6)})
    source.lasting = True

    def fail(*args):
        raise RuntimeError("CUDA error: made to fail\nmore")

    plain = Stage.add

    def add(self, fill, payload, *args):
        if worse and payload is source.pairs[2][1]:
            fail()
        plain(self, fill, payload, *args)

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
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


# The source fails.


def values(seed, count=8, size=10):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i in range(count)
    }


@both_modes
@pytest.mark.parametrize("call_size", [25, 8 << 30], ids=["many calls", "one call"])
@pytest.mark.parametrize("index", range(9))
def test_a_source_that_fails_at_any_tensor_leaves_no_worker_waiting(
    rig, expect, make_source, packed, call_size, index
):
    """The open call is completed with filler, none is opened after it, and the next sync works."""
    good, after = values(1), values(2)

    def fail(at):
        if at == index:
            raise OSError("disk on fire")

    pairs = [*good.items(), ("more", torch.zeros(1))] if index == 8 else list(good.items())
    declared = make_source(good).specs()
    one = rig(packed=packed, buffer_size=19, call_size=call_size, workers=2)
    with pytest.raises(SourceError, match=rf"source failed at tensor {index} .*disk on fire"):
        one.sync(make_source(pairs, declared, fail))
    plan = one.plan(make_source(good))
    assert one.calls <= len(plan.calls)
    for worker in one.workers:
        assert len(worker.chunks) == sum(
            len(call.chunks) if packed else len(call.wire_specs())
            for call in plan.calls[: one.calls]
        )
    one.sync(make_source(after))
    expect(one, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "source ended after 7 of 8"),
        (lambda pairs: [*pairs, ("x", torch.zeros(1))], "gave x after all 8"),
        (lambda pairs: [pairs[1], pairs[0], *pairs[2:]], "specs() says t0, the iterator gave t1"),
        (lambda pairs: [*pairs[:3], ("t3", torch.zeros(10)), *pairs[4:]], "t3 uint8[10]"),
    ],
    ids=["fewer", "more", "swapped", "dtype"],
)
def test_a_source_that_breaks_its_word(rig, expect, make_source, change, message):
    """Case 9."""
    good = values(1)
    one = rig(buffer_size=19)
    with pytest.raises(SpecMismatch) as caught:
        one.sync(make_source(change(list(good.items())), make_source(good).specs()))
    assert message in str(caught.value)
    one.sync(make_source(good))
    expect(one, good)


@both_modes
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(5, "Input/output error"), SourceError, "reading .*OSError.*Input/output error"),
        (SourceError("shard 3 is truncated"), SourceError, "^shard 3 is truncated$"),
        (TimeoutError("the hub is slow"), SourceError, "reading .*TimeoutError: the hub is slow"),
        (MemoryError(), SourceError, "reading .*MemoryError"),
    ],
)
def test_an_error_while_reading_is_the_source_s(
    rig, expect, make_source, deferred, packed, error, kind, message
):
    good = values(1)

    def fail(start, stop):
        raise error

    pairs = {n: deferred(t, fail) if n == "t4" else deferred(t) for n, t in good.items()}
    one = rig(packed=packed, buffer_size=19, workers=2)
    started = time.monotonic()
    with pytest.raises(kind, match=message):
        one.sync(make_source(pairs))
    assert time.monotonic() - started < 10
    kept = one.buffers()
    one.sync(make_source(good))
    expect(one, good)
    assert one.buffers() == kept, "nothing may still write there: the buffers were kept"


def test_a_payload_that_cannot_be_copied_names_its_tensor(rig, expect, make_source):
    good = values(1)
    pairs = {**good, "t3": torch.empty(10, dtype=torch.uint8, device="meta")}
    one = rig(buffer_size=19)
    with pytest.raises(SourceError, match="t3"):
        one.sync(make_source(pairs))
    one.sync(make_source(good))
    expect(one, good)


def test_a_read_that_hangs_ends_at_the_deadline_and_completes_the_stream(
    rig, expect, make_source, deferred
):
    """Whenever it wakes up, it must not write into a buffer that is used again."""
    old, new = values(1), values(2)
    release = threading.Event()

    def hang(start, stop):
        release.wait(PATIENCE)

    pairs = {n: deferred(t, hang) if n in ("t2", "t3", "t5") else t for n, t in old.items()}
    one = rig(buffer_size=39, progress=1, threads=4)
    one.sync(make_source(old))
    before = len(one.workers[0].chunks)
    started = time.monotonic()
    with pytest.raises(StreamerError, match="1 s"):
        one.sync(make_source(pairs))
    assert 0.9 < time.monotonic() - started < 8
    assert len(one.workers[0].chunks) == 2 * before

    def wake(index):
        time.sleep(0.2)  # by now the first chunks are staged
        release.set()
        time.sleep(0.2)

    one.on_call = wake
    one.sync(make_source(new))
    expect(one, new)


def test_a_source_that_hangs_is_given_up_and_the_stream_completed(rig, make_source, eventually):
    """The thread that pushes sits in the source's own code; the workers must not wait for it."""
    release = threading.Event()
    good = values(1)

    def hang(index):
        if index == 4:
            release.wait(PATIENCE)

    one = rig(buffer_size=19, progress=1)
    errors: list[BaseException] = []

    def push():
        try:
            one.sync(make_source(good, on_step=hang))
        except StreamerError as error:
            errors.append(error)

    pushing = threading.Thread(target=push)
    pushing.start()
    total = len(one.plan(make_source(good)).chunks)
    eventually(lambda: len(one.workers[0].chunks) == total, 10)
    release.set()
    pushing.join(PATIENCE)
    assert isinstance(errors[0], DeadlineExceeded)
    assert "t4" in str(errors[0])


def test_a_stop_between_chunks_counts_as_the_source_s_failure(rig, expect, make_source):
    """How a signal, or the limit of a whole push, ends a sync: the workers are not left waiting."""
    good = values(1)
    checks: list[int] = []

    def check():
        checks.append(1)
        if len(checks) == 3:
            raise DeadlineExceeded("the push took longer than its limit of 3 s")

    one = rig(buffer_size=19, num_buffers=1)
    with pytest.raises(DeadlineExceeded, match="limit of 3 s"):
        one.sync(make_source(good), check=check)
    one.sync(make_source(good))
    expect(one, good)


def test_an_observer_that_fails_does_not_leave_a_worker_waiting(rig, expect, make_source):
    def observe(nbytes):
        raise RuntimeError("no terminal")

    one = rig(buffer_size=19)
    with pytest.raises(RuntimeError, match="no terminal"):
        one.sync(make_source(values(1)), on_progress=observe)
    one.sync(make_source(values(1)))
    expect(one, values(1))


# Nothing of a sync that is over runs on.


def test_reads_of_calls_that_were_never_opened_do_not_spoil_the_next_sync(
    rig, expect, make_source, deferred, eventually
):
    """The chunk of a later call was staged ahead; its read wakes up in the middle of the next."""
    first, second = values(1, count=3), values(2, count=3)
    reading, release = threading.Event(), threading.Event()

    def fail(start, stop):
        reading.wait(PATIENCE)
        raise OSError("bad sector")

    def linger(start, stop):
        reading.set()
        release.wait(3)

    lingering = deferred(first["t1"], linger)
    pairs = {"t0": deferred(first["t0"], fail), "t1": lingering, "t2": first["t2"]}
    one = rig(buffer_size=9, call_size=1, num_buffers=2, threads=2)
    with pytest.raises(SourceError, match="bad sector"):
        one.sync(make_source(pairs))

    def wake(index):
        if index == 1:
            release.set()
            time.sleep(0.3)

    one.on_call = wake
    one.sync(make_source(second))
    expect(one, second)


@pytest.mark.parametrize("how", ["well", "begin fails", "a read fails"])
def test_nothing_is_read_after_the_iterator_has_ended(rig, expect, make_source, deferred, how):
    """A generator that opens its files in a ``with`` closes them when it ends, or is closed."""
    reading = threading.Event()
    ended = threading.Event()
    too_late: list[tuple[int, int]] = []

    def slow(start, stop):
        reading.set()
        time.sleep(0.2)
        if ended.is_set():
            too_late.append((start, stop))

    def fail(start, stop):
        reading.wait(PATIENCE)
        raise OSError("bad sector")

    class Files(make_source):
        def __iter__(self):
            try:
                yield from super().__iter__()
            finally:
                ended.set()

    good = values(1, count=4)
    pairs = {name: deferred(tensor, slow) for name, tensor in good.items()}
    if how == "a read fails":
        pairs["t0"] = deferred(good["t0"], fail)
    one = rig(buffer_size=9, call_size=1, num_buffers=3, threads=3)

    def begin():
        if how == "begin fails":
            reading.wait(PATIENCE)
            raise TransportError("a server refused")

    one.begin = begin
    if how == "well":
        one.sync(Files(pairs))
        expect(one, good)
    else:
        with pytest.raises(StreamerError):
            one.sync(Files(pairs))
    assert ended.is_set()
    time.sleep(0.5)
    assert too_late == []


# The transport fails.


@both_modes
@pytest.mark.parametrize("moment", ["before", "while staging", "while reading", "while sending"])
def test_an_abort_ends_the_sync_at_once(rig, make_source, deferred, packed, moment, eventually):
    good = values(1)
    reached = threading.Event()

    def pause(*_):
        reached.set()
        time.sleep(0.3)

    one = rig(packed=packed, buffer_size=19, progress=30)
    pairs = dict(good)
    source = make_source(pairs)
    if moment == "while staging":
        source = make_source(pairs, on_step=lambda index: index == 4 and pause())
    elif moment == "while reading":
        source = make_source({**pairs, "t4": deferred(good["t4"], pause)})
    elif moment == "while sending":
        one.workers[0].keep = lambda tensors: reached.set() or time.sleep(1)
    else:
        reached.set()

    def abort():
        reached.wait(PATIENCE)
        one.transport.abort("a server failed: 500")

    aborting = threading.Thread(target=abort)
    aborting.start()
    if moment == "before":
        aborting.join()
    started = time.monotonic()
    with pytest.raises(TransportError, match="a server failed: 500"):
        one.sync(source)
    assert time.monotonic() - started < 5
    aborting.join()


def test_a_worker_that_leaves_is_an_error(rig, make_source):
    one = rig(buffer_size=19)
    worker = one.workers[0]
    keep = worker.keep

    def leave(tensors):
        keep(tensors)
        if len(worker.chunks) == 2:
            worker.transport.close()

    worker.keep = leave
    with pytest.raises((TransportError, DeadlineExceeded)):
        one.sync(make_source(values(1)))


def test_a_worker_that_is_stuck_ends_at_the_deadline(rig, make_source):
    release = threading.Event()
    one = rig(buffer_size=19, progress=1)
    one.workers[0].keep = lambda tensors: release.wait(PATIENCE)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        one.sync(make_source(values(1)))
    assert 0.9 < time.monotonic() - started < 10
    release.set()


class Slow(WeightSource):
    """Takes 0.9 s for a tensor, or for reading one; bytes come in for ``seconds``."""

    def __init__(self, deferred, seconds, where):
        self.payload = deferred(torch.zeros(5), lambda start, stop: time.sleep(0.9))
        self.until, self.where = time.monotonic() + seconds, where

    def specs(self):
        return [TensorSpec(f"t{i}", torch.float32, (5,)) for i in range(3)]

    def __iter__(self):
        for spec in self.specs():
            if self.where == "iterating":
                time.sleep(0.9)
            yield spec.name, self.payload if self.where == "reading" else torch.zeros(5)

    def progress(self):
        return int(min(time.monotonic(), self.until) * 1000)


@pytest.mark.parametrize("where", ["iterating", "reading"])
def test_a_source_is_waited_for_while_bytes_come_in(rig, deferred, where):
    one = rig(buffer_size=19, progress=0.3, threads=1)
    one.sync(Slow(deferred, 60, where))
    assert len(one.workers[0].tensors) == 3


@pytest.mark.parametrize("where", ["iterating", "reading"])
def test_a_source_that_stands_still_is_not_waited_for(rig, deferred, where):
    one = rig(buffer_size=19, progress=0.3, threads=1)
    with pytest.raises((DeadlineExceeded, SourceError), match=r"0\.3 s"):
        one.sync(Slow(deferred, 0, where))


def test_the_tensor_that_did_not_come_is_named(rig, make_source):
    def on_step(index):
        if index == 2:
            time.sleep(1.0)

    one = rig(buffer_size=1000, progress=0.3)  # all are in one chunk
    with pytest.raises(DeadlineExceeded, match=r"did not go on for 0\.3 s, at c$"):
        one.sync(make_source({name: torch.ones(2) for name in "abcd"}, on_step=on_step))


@pytest.mark.parametrize("where", ["iterating", "reading"])
def test_a_source_whose_progress_fails_has_failed(rig, make_source, deferred, where):
    """The stream is completed, and the next sync goes over the same group."""

    class Failing(Slow):
        def progress(self):
            raise ValueError("made to\nfail")

    one = rig(buffer_size=19, progress=5, threads=1)
    with pytest.raises(SourceError) as caught:
        one.sync(Failing(deferred, 0, where))
    assert str(caught.value) == "the source's progress() failed: ValueError: made to fail"
    one.sync(make_source({"a": torch.ones(2)}))


def test_closing_while_a_sync_is_stuck_leaves_no_thread(rig, make_source, eventually):
    one = rig(buffer_size=19, progress=30)
    release = threading.Event()
    one.workers[0].keep = lambda tensors: release.wait(PATIENCE)
    errors: list[BaseException] = []

    def push():
        try:
            one.sync(make_source(values(1)))
        except TransportError as error:
            errors.append(error)

    pushing = threading.Thread(target=push)
    pushing.start()
    eventually(lambda: one.group.log)
    started = time.monotonic()
    one.transport.close()
    one.broadcaster.close()
    pushing.join(PATIENCE)
    assert time.monotonic() - started < 5
    assert len(errors) == 1
    release.set()


def test_many_syncs_leak_nothing(rig, make_source, deferred, leaks, eventually):
    one = rig(buffer_size=19)

    def once(seed):
        good = values(seed)
        one.sync(make_source({n: deferred(t) for n, t in good.items()}))
        with pytest.raises(SourceError):
            one.sync(make_source(list(good.items())[:-1], make_source(good).specs()))

    once(0)
    before = leaks()
    for seed in range(1, 8):
        once(seed)
    eventually(lambda: all(now <= before[name] for name, now in leaks().items()), 10)


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
