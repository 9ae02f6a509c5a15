"""Rank 0's data path over the loopback transport, with our own receive loop at the other end."""

from __future__ import annotations

import pytest

from kit_broadcaster import Rig


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
