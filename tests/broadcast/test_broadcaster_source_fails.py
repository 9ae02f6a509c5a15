"""The source fails, or is slow: no worker is left waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kit_broadcaster import values
from kit_checks import PATIENCE, both_modes
from streamer import (
    DeadlineExceeded,
    SourceError,
    SpecMismatch,
    StreamerError,
    TensorSpec,
    WeightSource,
)

pytestmark = pytest.mark.timeout(60)


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


# The source is slow.


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
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
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
