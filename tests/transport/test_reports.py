"""What workers write into the store: read by the trainer, and not to be relied on."""

from __future__ import annotations

import contextlib

import pytest

from streamer import DeadlineExceeded, TransportError
from streamer.transport.lifeline import Lifeline, worker_key

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def host():
    with contextlib.closing(Lifeline.host("127.0.0.1")) as lifeline:
        yield lifeline


@pytest.mark.parametrize("said", ["[1, 2]", "5", "null", "{", "\x00", '"left"', "[" * 100_000])
def test_a_report_that_is_no_object_is_an_error_of_ours(host, said):
    host.store.set(worker_key(3), said)
    with pytest.raises(TransportError, match=r"rank 3 has reported .* no worker of") as caught:
        host.reported(3)
    assert len(str(caught.value)) < 250


def test_a_report_in_no_encoding_is_an_error_of_ours(host):
    host.store.set(worker_key(3), b"\xff\xfe\xff")
    with pytest.raises(TransportError, match="rank 3 has reported"):
        host.reported(3)


def test_of_many_ranks_that_are_missing_a_few_are_named(host):
    host.store.set(worker_key(3), "{}")
    with pytest.raises(DeadlineExceeded) as caught:
        host.wait_for_workers(101, 0.1, lambda: None)
    assert str(caught.value).startswith(
        "of 100 workers, ranks [1, 2, 4, 5, 6, 7, 8, 9] and 91 more have not joined 127.0.0.1:"
    )
