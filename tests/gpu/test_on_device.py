"""Tensors that are on the trainer's GPU, into a worker on another: ``run.sh CARRY OUT faults``.

Each must arrive as it was when it was yielded, whatever its source does with the memory afterwards.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import streamer
from streamer import TensorSpec, WeightSource

COUNT, SIZE, BUFFER_SIZE = 12, 32 << 20, 8 << 20
"""Tensors, bytes of the large ones, which are broadcast where they are, and of a chunk."""
DELAY = 20_000_000
"""Clock cycles, some ten milliseconds, for which the device is kept busy."""


def shape(index: int) -> tuple[int]:
    return (SIZE if index % 3 else 1000,)


def value(index: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(index)
    return torch.randint(
        0, 256, shape(index), dtype=torch.uint8, device="cuda", generator=generator
    )


class OnDevice(WeightSource):
    """The values, each late, in memory that is used again."""

    def specs(self):
        return [TensorSpec(f"t{index:02}", torch.uint8, shape(index)) for index in range(COUNT)]


class Borrowed(OnDevice):
    """One buffer for all."""

    def __iter__(self):
        buffer = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        for index in range(COUNT):
            torch.cuda._sleep(DELAY)
            tensor = buffer[: shape(index)[0]].copy_(value(index))
            yield f"t{index:02}", tensor
            tensor.fill_(255)


class Made(OnDevice):
    """Made one by one, and freed: what is allocated next gets the memory."""

    lasting = True

    def __iter__(self):
        for index in range(COUNT):
            torch.cuda._sleep(DELAY)
            tensor = value(index)
            yield f"t{index:02}", tensor
            del tensor
            torch.full(shape(index), 255, dtype=torch.uint8, device="cuda")


class Held(OnDevice):
    """All there, as the tensors of a module are."""

    lasting = True

    def __iter__(self):
        yield from {f"t{index:02}": value(index) for index in range(COUNT)}.items()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
@pytest.mark.parametrize("source", [Borrowed, Made, Held])
def test_what_is_yielded_arrives(server, source, packed):
    expected = {
        f"t{index:02}": hashlib.sha256(value(index).cpu().numpy().tobytes()).hexdigest()
        for index in range(COUNT)
    }
    with streamer.connect(server.url, packed=packed, buffer_size=BUFFER_SIZE) as session:
        for _ in range(3):
            session.push(source())
    (held,) = server.checksums()
    assert {name: held.get(name) for name in expected} == expected


@pytest.mark.timeout(60)
def test_a_source_that_makes_its_tensors_holds_few(server):
    with streamer.connect(server.url, buffer_size=BUFFER_SIZE) as session:
        session.push(Made())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        session.push(Made())
        more = torch.cuda.max_memory_allocated() - before
    assert more <= 3 * SIZE  # one that is sent, the next, and what writes over the first


PUSH_FROM_THE_SECOND = """
import ctypes, sys, torch, streamer
streamer.push(sys.argv[1], sys.argv[2], device=torch.device("cuda", 1))
cuda, active, flags = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint()
for device in (0, 1):
    assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    print(active.value)
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif("NCCL_HOSTID" in os.environ, reason="there is one GPU")
def test_the_other_gpus_of_the_trainer_are_left_alone(server, tmp_path):
    """Each context takes half a gigabyte of a GPU that somebody else may fill."""
    path = tmp_path / "model.safetensors"
    save_file({f"t{index}": value(index).cpu() for index in range(COUNT)}, path)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PUSH_FROM_THE_SECOND, path, server.url],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (ended.stdout.split(), ended.stderr) == (["0", "1"], "")
