"""Whatever a trainer asks of a worker, only errors of ours come out."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer import StreamerError
from streamer.receiver.endpoint import Endpoint, InitInfo
from streamer.receiver.loop import Layout, parse_update, receive
from streamer.transport.base import Transport

pytestmark = pytest.mark.timeout(120)

FUZZ = settings(max_examples=400, deadline=None, database=None, derandomize=True)
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=10)
    | st.lists(st.integers(-1, 3), max_size=3)
)
INIT = {
    "rank_offset": ODD,
    "world_size": ODD,
    "nccl_unique_id_b64": ODD,
    "master_address": ODD,
    "master_port": ODD,
    "packed": ODD,
    "packed_buffer_size_bytes": ODD,
    "packed_num_buffers": ODD,
    "join_seconds": ODD,
    "other": ODD,
}
SOUND = {"rank_offset": 1, "world_size": 2, "master_address": "127.0.0.1", "master_port": 1}


class Nowhere(Transport):
    """Receives nothing, at once."""

    def rendezvous(self):
        return {}

    def connect(self, timeout):
        pass

    def _broadcast(self, tensor, timeout):
        tensor.view(-1).view(torch.uint8).zero_()

    def _abort(self):
        pass

    def close(self):
        pass


def ours_alone(step):
    """Run ``step``; nothing but a `StreamerError` of one line, within seconds."""
    started = time.monotonic()
    failure: StreamerError | None = None
    try:
        step()
    except StreamerError as error:
        failure = error
    assert failure is None or str(failure).isprintable()
    assert time.monotonic() - started < 5


@FUZZ
@given(info=st.fixed_dictionaries({}, optional=INIT), sound=st.booleans())
def test_init_info(info, sound):
    ours_alone(lambda: InitInfo.parse({**SOUND, **info} if sound else info))


@settings(FUZZ, max_examples=60)
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.hex()))
def test_unique_ids(text):
    """One that cannot be a unique id is refused before NCCL hears of it."""
    end = Endpoint(torch.device("cpu"), 0)
    info = InitInfo(rank_offset=1, world_size=2, nccl_unique_id_b64=text)
    with pytest.raises(StreamerError):
        end.join(info, update_open=False)


NAMES = st.lists(st.text(max_size=5) | ODD, max_size=3)
DTYPES = st.lists(
    st.sampled_from(["float32", "bfloat16", "uint8", "int64", "float4_e2m1fn_x2", "nn", "load",
                     "Tensor", "quint4x2", "bits8", "__class__", "float8_e8m0fnu"]) | ODD,
    max_size=3,
)  # fmt: skip
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3) | ODD, max_size=3)
SIZED = st.integers(0, 3).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "names": st.lists(st.text(max_size=4), min_size=n, max_size=n),
            "dtype_names": st.lists(
                st.sampled_from(["float32", "bfloat16", "uint8", "bool", "complex64", "bits8",
                                 "quint4x2", "uint1", "float4_e2m1fn_x2"]),
                min_size=n, max_size=n),
            "shapes": st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=n, max_size=n),
        }
    )
)  # fmt: skip
UPDATES = SIZED | st.fixed_dictionaries(
    {},
    optional={"names": NAMES | ODD, "dtype_names": DTYPES | ODD, "shapes": SHAPES | ODD},
)


@FUZZ
@given(update=UPDATES, chunk_sizes=ODD, packed=st.booleans(), buffer_size=st.integers(1, 40))
def test_update_info(update, chunk_sizes, packed, buffer_size):
    def step():
        receive(
            Nowhere(torch.device("cpu"), 1, 2),
            Layout.of(
                parse_update(update),
                packed=packed,
                buffer_size=buffer_size,
                chunk_sizes=chunk_sizes,
            ),
            allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
            sink=lambda tensors: None,
            timeout=1,
        )

    ours_alone(step)


@pytest.mark.parametrize("shape", [[1 << 62], [1 << 40, 1 << 40], [2**70]])
def test_a_tensor_that_no_memory_holds(shape):
    """Refused, not tried: a number of the trainer's must not end the worker."""
    end = Endpoint(torch.device("cpu"), 0)
    end._transport = Nowhere(torch.device("cpu"), 1, 2)
    end._info = InitInfo.parse(SOUND)
    info = {"names": ["a"], "dtype_names": ["uint8"], "shapes": [shape]}
    with pytest.raises(StreamerError):
        end.receive(info, lambda n: torch.empty(n, dtype=torch.uint8), lambda tensors: None)
