"""`SourceSuite` on wrong sources: specs, order, dtypes, shapes, values, replay, borrowed memory.

Each is made of the right one, which passes, and fails one check with both values in its message.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kit_acme import WEIGHTS, Right, Suite, outcome, suite_of
from streamer import TensorSpec, WeightSource

pytestmark = pytest.mark.timeout(60)


class Changed(Right):
    """Goes through the pairs of the right one, each of which ``change`` may exchange."""

    def __iter__(self) -> Iterator[Any]:
        for name, payload in super().__iter__():
            yield self.change(name, payload)

    def change(self, name: str, payload: Any) -> tuple[str, Any]:
        return name, payload


class OneNameTwice(Right):
    """Also in the iterator, so that the two agree."""

    def specs(self) -> Sequence[TensorSpec]:
        return [*super().specs(), TensorSpec("m", torch.bfloat16, ())]

    def __iter__(self) -> Iterator[Any]:
        yield from WEIGHTS.items()
        yield "m", WEIGHTS["m"]


class ShapeIsAList(Right):
    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(s.name, s.dtype, list(s.shape)) for s in super().specs()]  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from WEIGHTS.items()


class OtherSpecsTheSecondTime(Right):
    calls = 0

    def specs(self) -> Sequence[TensorSpec]:
        self.calls += 1
        specs = list(super().specs())
        if self.calls == 2 and sys._getframe(1).f_code.co_name == "test_specs_are_sound":
            specs[3] = TensorSpec("a", torch.int16, (8,))
        return specs


class SpecsIterate(Right):
    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in self]

    def __iter__(self) -> Iterator[Any]:
        for name, tensor in WEIGHTS.items():
            yield name, tensor.clone()


class SpecsRead(Right):
    def specs(self) -> Sequence[TensorSpec]:
        for _ in range(200):
            os.pread(self.file, 4096, 0)
        return super().specs()


class SpecsCopy(Right):
    def specs(self) -> Sequence[TensorSpec]:
        torch.ones(1 << 16).mul(2)
        return super().specs()


class TwoSwapped(Right):
    def __iter__(self) -> Iterator[Any]:
        pairs = [(name, tensor.clone()) for name, tensor in WEIGHTS.items()]
        yield from [pairs[1], pairs[0], *pairs[2:]]


class OneFewer(Right):
    def __iter__(self) -> Iterator[Any]:
        yield from list(WEIGHTS.items())[:-1]


class OneMore(Right):
    def __iter__(self) -> Iterator[Any]:
        yield from WEIGHTS.items()
        yield "late", torch.ones(1)


class AnotherName(Right):
    """In the specs as well: only the author's expectation can tell."""

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(s.name.replace("m", "mm"), s.dtype, s.shape) for s in super().specs()]

    def __iter__(self) -> Iterator[Any]:
        for name, tensor in WEIGHTS.items():
            yield name.replace("m", "mm"), tensor


class AnotherDtype(Changed):
    def change(self, name: str, payload: Any) -> tuple[str, Any]:
        return name, payload.float() if name == "m" else payload


class AnotherShape(Changed):
    def change(self, name: str, payload: Any) -> tuple[str, Any]:
        return name, payload.view(6, 4) if name == "z" else payload


class DtypeOfSpecsIsWrongToo(Changed):
    def specs(self) -> Sequence[TensorSpec]:
        specs = super().specs()
        return [TensorSpec(s.name, torch.half, s.shape) if s.name == "m" else s for s in specs]

    def __iter__(self) -> Iterator[Any]:
        for name, tensor in WEIGHTS.items():
            yield name, tensor.half() if name == "m" else tensor


class OneBit(Changed):
    """A negative zero for a zero, which ``==`` would not tell."""

    def change(self, name: str, payload: Any) -> tuple[str, Any]:
        if name == "z":
            payload[0, 0] = -0.0
        return name, payload


class Exhausted(Right):
    """Is at its end for good, once it has come there."""

    ended = False

    def __iter__(self) -> Iterator[Any]:
        if not self.ended:
            yield from super().__iter__()
            self.ended = True


class OtherValuesTheSecondTime(Exhausted):
    def __iter__(self) -> Iterator[Any]:
        for name, payload in Right.__iter__(self):
            yield name, payload + self.ended if name == "z" else payload
        self.ended = True


class NeedsItsPayloads(Right):
    """The next tensor is made of the last one, of which it has no reference of its own."""

    def __iter__(self) -> Iterator[Any]:
        last: weakref.ref[torch.Tensor] | None = None
        for name, tensor in WEIGHTS.items():
            if last is not None and last() is None:
                raise ReferenceError("the last tensor is gone")
            copy = tensor.clone()
            last = weakref.ref(copy)
            pair = [(name, copy)]
            del copy
            yield pair.pop()


class HoldsTheLast(Right):
    """As a loop does whose variable is still set."""

    def __iter__(self) -> Iterator[Any]:
        for name in WEIGHTS:
            tensor = WEIGHTS[name].clone()
            yield name, tensor


class NotLasting(Right):
    lasting = True


class VersionIsANumber(Right):
    weight_version = 7  # type: ignore[assignment]


class RanksAreAText(Right):
    ranks = "all"  # type: ignore[assignment]


class OneIsSparse(Changed):
    def change(self, name: str, payload: Any) -> tuple[str, Any]:
        return name, payload.to_sparse() if name == "z" else payload


WRONG: list[tuple[type[WeightSource], tuple[str, ...], str]] = [
    (OneNameTwice, ("specs_are_sound",), r"called m: m bfloat16\[\] and m bfloat16\[\]$"),
    (ShapeIsAList, ("specs_are_sound",), r"^z: the shape is \[4, 6\], a list, not a tuple"),
    (
        OtherSpecsTheSecondTime,
        ("specs_are_sound",),
        r"^tensor 3: specs\(\) said a int16\[7\], then a int16\[8\]$",
    ),
    (SpecsIterate, ("specs_move_no_data",), r"specs\(\) iterates .*: z float32\[4, 6\]"),
    (SpecsRead, ("specs_move_no_data",), r"reads 1\d{5} bytes .* it may move 65536: z float"),
    (SpecsCopy, ("specs_move_no_data",), r"makes 5\d{5}; it may move 65536: z float32"),
    (TwoSwapped, ("order_and_names",), r"tensor 0: specs\(\) says z, the iterator gave m$"),
    (OneFewer, ("order_and_names",), r"tensor 4: specs\(\) says b, the iterator gave nothing"),
    (OneMore, ("order_and_names",), r"tensor 5: specs\(\) says nothing, the iterator gave late"),
    (AnotherName, ("order_and_names",), r"^m is expected, and the iterator does not have it"),
    (
        AnotherDtype,
        ("dtypes_and_shapes",),
        r"specs\(\) says m bfloat16\[\], the iterator gave m float32\[\]$",
    ),
    (
        AnotherShape,
        ("dtypes_and_shapes",),
        r"says z float32\[4, 6\], the iterator gave z float32\[6, 4\]$",
    ),
    (
        DtypeOfSpecsIsWrongToo,
        ("dtypes_and_shapes",),
        r"specs\(\) says m float16\[\], expected is m bfloat16\[\]$",
    ),
    (OneBit, ("values",), r"^z, element \[0, 0\]: the source gives -0.0, expected is 0.0$"),
    (Exhausted, ("replay",), r"0: z float32\[4, 6\] the first time, nothing the second time"),
    (
        OtherValuesTheSecondTime,
        ("replay",),
        r"^z, element \[0, 0\]: 0.0 the first time, 1.0 the second time$",
    ),
    (
        NotLasting,
        ("lasting", "broadcast_packed"),
        r"^z, element \[0, 0\]: 0.0 when it came, .* says it is lasting$",
    ),
    (VersionIsANumber, ("what_it_says_of_itself",), r"^weight_version is 7, not str or NoneType$"),
    (RanksAreAText, ("what_it_says_of_itself",), r"^ranks is 'all', not Ranks or NoneType$"),
    (HoldsTheLast, ("one_at_a_time",), r"^z: the iterator still holds it while it makes the next"),
    (NeedsItsPayloads, ("borrowed_memory",), r"^m: it comes if .*: the last tensor is gone$"),
]


@pytest.mark.parametrize(
    ("wrong", "checks", "message"), WRONG, ids=[kind.__name__ for kind, _, _ in WRONG]
)
def test_a_wrong_source_fails_there_and_nowhere_else(
    fails_only: Callable[..., None],
    wrong: type[WeightSource],
    checks: tuple[str, ...],
    message: str,
) -> None:
    fails_only(wrong, checks, message)


def test_a_sparse_tensor_is_named(tmp_path: Path, install: Callable[..., None]) -> None:
    install(OneIsSparse)
    failed = outcome(suite_of(OneIsSparse), tmp_path)
    assert failed["values"] == "z has the layout torch.sparse_coo: make it dense, with to_dense()"


def test_a_right_source_passes(tmp_path: Path, install: Callable[..., None]) -> None:
    install(Right)
    assert outcome(Suite, tmp_path) == {}
