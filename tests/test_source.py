"""TensorSpec, and `checked`, which holds what a source yields against what it declared."""

from __future__ import annotations

import pytest
import torch

from streamer import SourceError, SpecMismatch, TensorSpec, TransportError, UsageError, WeightSource
from streamer.source import check_sendable, checked, ranks_of, version_of

A, B, C = (torch.full((2, 2), float(value)) for value in range(3))
SPECS = [TensorSpec(name, torch.float32, (2, 2)) for name in "abc"]


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "name"),
    [
        (torch.bfloat16, (3, 5), 30, "bfloat16"),
        (torch.float32, (), 4, "float32"),
        (torch.float32, (4, 0), 0, "float32"),
        (torch.float8_e4m3fn, (7,), 7, "float8_e4m3fn"),
        (torch.float8_e5m2, (7,), 7, "float8_e5m2"),
        (torch.float8_e8m0fnu, (7,), 7, "float8_e8m0fnu"),
        (torch.float4_e2m1fn_x2, (7, 2), 14, "float4_e2m1fn_x2"),
        (torch.bool, (3,), 3, "bool"),
        (torch.complex64, (3,), 24, "complex64"),
        (torch.complex128, (1,), 16, "complex128"),
        (torch.int16, (3,), 6, "int16"),
        (torch.uint64, (1 << 40,), 1 << 43, "uint64"),
    ],
)
def test_a_spec_knows_its_bytes_and_the_name_of_its_dtype(dtype, shape, nbytes, name):
    spec = TensorSpec("w", dtype, shape)
    assert spec.nbytes == nbytes
    assert spec.dtype_name == name
    assert getattr(torch, name) is dtype
    assert str(spec) == f"w {name}{list(shape)}"


def test_a_spec_is_a_value():
    spec = TensorSpec("w", torch.float32, (2,))
    assert spec == TensorSpec("w", torch.float32, (2,))
    assert len({spec, TensorSpec("w", torch.float32, (2,))}) == 1
    with pytest.raises(AttributeError):
        spec.name = "v"


def test_checked_gives_the_payloads_of_a_source_that_keeps_its_word(make_source, deferred):
    late = deferred(B)
    source = make_source({"a": A, "b": late, "c": C})
    first, second, third = checked(source, SPECS)
    assert (first is A, second is late, third is C) == (True, True, True)


def test_checked_is_lazy(make_source):
    """A payload is borrowed until the next step: the source must not be advanced before."""
    steps: list[int] = []
    payloads = checked(make_source({"a": A, "b": B, "c": C}, on_step=steps.append), SPECS)
    assert steps == []
    next(payloads)
    assert steps == [0]
    next(payloads)
    assert steps == [0, 1]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "source ended after 0 of 3 tensors: next in specs() is a float32[2, 2]"),
        (
            [("a", A), ("b", B)],
            "source ended after 2 of 3 tensors: next in specs() is c float32[2, 2]",
        ),
        (
            [("a", A), ("b", B), ("c", C), ("d", A)],
            "the iterator gave d after all 3 tensors of specs()",
        ),
        (
            [("a", A), ("c", C), ("b", B)],
            "tensor 1: specs() says b, the iterator gave c: give the names of specs(), in their "
            "order",
        ),
        (
            [("a", A), ("b", B.double())],
            "tensor 1: specs() says b float32[2, 2], the iterator gave b float64[2, 2]",
        ),
        (
            [("a", A.view(4))],
            "tensor 0: specs() says a float32[2, 2], the iterator gave a float32[4]",
        ),
        (
            [("a", A.view(1, 2, 2))],
            "tensor 0: specs() says a float32[2, 2], the iterator gave a float32[1, 2, 2]",
        ),
        (
            [("a", A), ("b", b"bytes")],
            "tensor 1 (b): the payload is a bytes, not a torch.Tensor or a streamer.DeferredTensor",
        ),
        (
            [("a", None)],
            "tensor 0 (a): the payload is a NoneType, not a torch.Tensor or a "
            "streamer.DeferredTensor",
        ),
    ],
)
def test_the_first_difference_is_named(make_source, pairs, message):
    """Case 9."""
    with pytest.raises(SpecMismatch) as caught:
        list(checked(make_source(pairs, SPECS), SPECS))
    assert str(caught.value) == message
    assert isinstance(caught.value, SourceError)


@pytest.mark.parametrize(
    "bad", [A, ("a",), ("a", A, "more"), None, 5], ids=["tensor", "one", "three", "none", "number"]
)
def test_what_is_no_pair_is_named(make_source, bad):
    with pytest.raises(SpecMismatch) as caught:
        list(checked(make_source([bad], SPECS), SPECS))
    assert "tensor 0" in str(caught.value)
    assert "pair" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("index", "where"), [(0, "tensor 0 (a)"), (1, "tensor 1 (b)"), (3, "tensor 3 (the end)")]
)
def test_a_foreign_exception_becomes_a_source_error(make_source, index, where):
    class Broken(WeightSource):
        def specs(self):
            return SPECS

        def __iter__(self):
            yield from [("a", A), ("b", B), ("c", C)][:index]
            raise KeyError("missing")

    with pytest.raises(SourceError) as caught:
        list(checked(Broken(), SPECS))
    assert str(caught.value) == f"source failed at {where}: KeyError: 'missing'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert not isinstance(caught.value, SpecMismatch)


class TwoTensors(torch.Tensor):
    """A wrapper without memory of its own, as DTensor and torchao's are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"made to fail: {function}")


def freed(tensor):
    """As FSDP1 and ZeRO leave what is not gathered: reading it ends the process."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A.to_sparse(), "has the layout torch.sparse_coo: make it dense, with to_dense()"),
        (
            lambda: A.to_sparse_csr(),
            "has the layout torch.sparse_csr: make it dense, with to_dense()",
        ),
        (
            lambda: torch.quantize_per_tensor(A, 0.1, 0, torch.qint8),
            "is of torch.qint8, whose memory is not its values: dequantize() it",
        ),
        (
            lambda: A.to("meta"),
            "is on the meta device, without values: load the model's weights first",
        ),
        (
            lambda: torch.nested.nested_tensor([A, A]),
            "is a nested tensor, of no one shape: yield its parts, from unbind()",
        ),
        (
            lambda: torch.nested.nested_tensor([A, A], layout=torch.jagged),
            "is a nested tensor, of no one shape: yield its parts, from unbind()",
        ),
        (
            lambda: TwoTensors(A),
            f"is a {__name__}.TwoTensors, whose memory is not its values: yield a plain tensor of "
            "them",
        ),
        *(
            (make, "has no memory any more, which sharding frees: gather it first")
            for make in (
                lambda: freed(torch.ones(2, 2)),
                lambda: freed(torch.nn.Parameter(torch.ones(2, 2))),
                lambda: freed(torch.ones(8)[4:]).view(2, 2),
                lambda: freed(torch.ones(4, 4)[::2, ::2]),
                lambda: freed(torch.ones(()).expand(2, 2)),
            )
        ),
    ],
    ids=[
        *("sparse", "csr", "quantized", "meta", "nested", "jagged", "wrapper"),
        *("freed", "freed parameter", "freed view", "freed part", "freed expanded"),
    ],
)
def test_a_tensor_whose_memory_is_not_its_values_is_named(make_source, make, message):
    made = make()
    with pytest.raises(SourceError) as caught:
        list(checked(make_source([("a", A), ("b", made)], SPECS), SPECS))
    assert str(caught.value) == f"tensor 1 (b) {message}"


def test_a_memory_that_is_longer_or_shorter_than_a_view_of_it_is_fine(make_source):
    base = torch.arange(24.0)
    views = {
        "part": base[20:],
        "turned": base.view(4, 6).t(),
        "steps": base[3::7],
        "expanded": base[:1].expand(50),
        "none": base[24:],
        "shared": freed(torch.ones(0, 3)),
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "scalar": base[23],
    }
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in views.items()]
    assert len(list(checked(make_source(views), specs))) == len(views)
    base.untyped_storage().resize_(23 * 4)
    check_sendable("steps", views["steps"])  # its last element is number 17
    for name in ("part", "turned", "scalar"):
        with pytest.raises(SourceError, match=f"^{name} has no memory any more"):
            check_sendable(name, views[name])


def test_an_iterator_that_cannot_be_made_is_a_source_error():
    class Broken(WeightSource):
        def specs(self):
            return SPECS

        def __iter__(self):
            raise OSError("no disk")

    with pytest.raises(SourceError, match=r"tensor 0 \(a\): OSError: no disk"):
        list(checked(Broken(), SPECS))


@pytest.mark.parametrize(
    "error",
    [
        SourceError("the disk is gone"),
        SpecMismatch("not so"),
        UsageError("no such option"),
        TransportError("over"),
    ],
)
def test_an_error_of_ours_comes_through_as_it_is(make_source, error):
    def fail(index):
        raise error

    with pytest.raises(type(error)) as caught:
        list(checked(make_source({"a": A}, SPECS, fail), SPECS))
    assert caught.value is error


def test_an_interrupt_comes_through(make_source):
    def interrupt(index):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(checked(make_source({"a": A}, SPECS, interrupt), SPECS))


def test_closing_closes_the_iterator_of_the_source():
    """A source that holds files open in its iterator lets go of them when a sync ends early."""
    ended: list[bool] = []

    class Files(WeightSource):
        def specs(self):
            return SPECS

        def __iter__(self):
            try:
                yield from [("a", A), ("b", B), ("c", C)]
            finally:
                ended.append(True)

    payloads = checked(Files(), SPECS)
    next(payloads)
    assert ended == []
    payloads.close()
    assert ended == [True]


def test_an_empty_source_of_no_specs_ends(make_source):
    assert list(checked(make_source({}), [])) == []


def test_a_source_of_one_method_more_closes_without_effect(make_source):
    class Minimal(WeightSource):
        def specs(self):
            return []

        def __iter__(self):
            return iter([])

    source = Minimal()
    assert source.weight_version is None
    source.close()
    with pytest.raises(TypeError):
        WeightSource()


NOTHING = {"specs": lambda self: [], "__iter__": lambda self: iter(())}


@pytest.mark.parametrize("what", ["weight_version", "ranks"])
def test_a_property_that_raises_is_the_sources_failure(what):
    def fail(self):
        raise KeyError("layer 7")

    source = type("Broken", (WeightSource,), {**NOTHING, what: property(fail)})()
    ask = {"weight_version": version_of, "ranks": ranks_of}[what]
    with pytest.raises(SourceError, match=rf"the source's {what} failed: KeyError: 'layer 7'"):
        ask(source)


def test_ranks_of_another_type():
    source = type("Odd", (WeightSource,), {**NOTHING, "ranks": True})()
    with pytest.raises(
        SourceError, match=r"ranks failed: TypeError: None or a streamer\.Ranks, not"
    ):
        ranks_of(source)
