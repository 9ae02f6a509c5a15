"""One file: what a sound header says, what is refused, and that safetensors agrees."""

from __future__ import annotations

import json
import re
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from streamer_safetensors import SafetensorsSource
from streamer_safetensors.header import _DTYPES

from streamer import SourceError, TensorSpec

FUZZ = settings(
    max_examples=250,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def specs_of(path: Path) -> list[TensorSpec]:
    with closing(SafetensorsSource(path)) as source:
        return list(source.specs())


class TestSoundFiles:
    @pytest.mark.parametrize(
        "name",
        [
            "bool",
            "uint8",
            "int8",
            "float8_e5m2",
            "float8_e4m3fn",
            "float8_e8m0fnu",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "int16",
            "uint16",
            "float16",
            "bfloat16",
            "int32",
            "uint32",
            "float32",
            "complex64",
            "float64",
            "int64",
            "uint64",
            "float4_e2m1fn_x2",
        ],
    )
    def test_every_dtype_that_safetensors_writes(self, tmp_path, name):
        dtype = getattr(torch, name)
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        save_file({"w": raw.view(dtype).reshape(3, 2)}, tmp_path / "m.safetensors")
        with closing(SafetensorsSource(tmp_path / "m.safetensors")) as source:
            assert list(source.specs()) == [TensorSpec("w", dtype, (3, 2))]
            ((_, tensor),) = source
            data = bytearray(len(raw))
            tensor.read_into(memoryview(data), 0, len(raw))
        assert list(data) == raw.tolist()

    def test_no_dtype_of_safetensors_is_forgotten(self, tmp_path, write_raw, entry):
        write_raw(tmp_path / "m.safetensors", {"w": entry("X", [1], [0, 1])}, b"x")
        with pytest.raises(Exception, match="expected one of") as caught:
            safe_open(tmp_path / "m.safetensors", "pt")
        names = str(caught.value).split("expected one of")[1].split("`")[1::2]
        assert set(names) == {*_DTYPES, "F6_E2M3", "F6_E3M2"}

    def test_scalars_and_empty_tensors(self, tmp_path):
        save_file(
            {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "w": torch.ones(2)},
            tmp_path / "m.safetensors",
        )
        assert {spec.name: spec.shape for spec in specs_of(tmp_path / "m.safetensors")} == {
            "scalar": (),
            "empty": (0, 3),
            "w": (2,),
        }

    def test_the_order_is_that_of_the_bytes(self, tmp_path, write_raw, entry):
        header = {"late": entry("U8", [1], [2, 3]), "early": entry("U8", [2], [0, 2])}
        path = write_raw(tmp_path / "m.safetensors", header, b"abc")
        assert [spec.name for spec in specs_of(path)] == ["early", "late"]

    def test_fp4_is_counted_in_pairs_by_torch(self, tmp_path, write_raw, entry):
        path = write_raw(tmp_path / "m.safetensors", {"w": entry("F4", [3, 8], [0, 12])}, b"x" * 12)
        assert specs_of(path) == [TensorSpec("w", torch.float4_e2m1fn_x2, (3, 4))]

    @pytest.mark.parametrize("name", ["", "層.重み", "a" * 5000, "two\nlines", "\x00"])
    def test_any_unicode_is_a_name(self, tmp_path, write_raw, entry, name):
        path = write_raw(tmp_path / "m.safetensors", {name: entry("U8", [1], [0, 1])}, b"x")
        assert [spec.name for spec in specs_of(path)] == [name]

    def test_metadata_is_no_tensor(self, tmp_path):
        save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors", {"format": "pt"})
        assert [spec.name for spec in specs_of(tmp_path / "m.safetensors")] == ["w"]


class TestDamagedFiles:
    """Case 20: the file and a likely cause are named."""

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "is empty.*download or copy was interrupted"),
            (b"1234567", "truncated: it has 7 bytes, and its header alone needs 8"),
            (struct.pack("<Q", 100) + b"{}", "truncated: it has 10 bytes.* needs 108"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
                "Git LFS pointer.*git lfs pull",
            ),
            (b"<!DOCTYPE html><html></html>", "HTML.*download it again"),
            (b"<html><body>404</body></html>", "HTML"),
            (b'{"error": "Repository not found"}', "JSON text.*failed download"),
            (b"GGUF\x03\0\0\0\1\0\0\0", "GGUF"),
            (struct.pack("<Q", 100_000_001) + bytes(64), "header would be 100000001 bytes long"),
            (struct.pack("<Q", 2**64 - 1) + b"{}", "header would be 18446744073709551615 bytes"),
        ],
    )
    def test_what_is_no_safetensors_file(self, tmp_path, refused, content, expected):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        assert_matches(refused(path), expected)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_pickle(self, tmp_path, refused, zipped):
        path = tmp_path / "model.safetensors"
        torch.save({"w": torch.ones(8)}, path, _use_new_zipfile_serialization=zipped)
        assert_matches(refused(path), "PyTorch pickle.*convert it")

    def test_a_length_that_looks_like_another_format_is_only_a_length(self, tmp_path, write_raw):
        header = '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        for first in b"<{":
            path = write_raw(tmp_path / "m.safetensors", header.ljust(first), b"x")
            assert path.read_bytes()[0] == first
            assert len(specs_of(path)) == 1

    def test_a_header_beyond_the_limit_of_the_format(self, tmp_path, refused):
        path = tmp_path / "m.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 100_000_001))
            file.truncate(200_000_000)
        assert_matches(refused(path), "100000000 are allowed")

    def test_cut_off_and_appended(self, tmp_path, refused):
        path = tmp_path / "m.safetensors"
        save_file({"w": torch.ones(8)}, path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        assert_matches(refused(path), "truncated: the tensors take 32 bytes.* holds 24.*download")
        path.write_bytes(whole + b"12345678")
        assert_matches(refused(path), "8 bytes too many: the tensors take 32 bytes.* holds 40")

    @pytest.mark.parametrize("kept", range(0, 96, 7))
    def test_a_cut_anywhere_is_noticed(self, tmp_path, refused, kept):
        path = tmp_path / "m.safetensors"
        save_file({"w": torch.ones(8)}, path)
        path.write_bytes(path.read_bytes()[:kept])
        assert_matches(refused(path), "truncated|empty")


class TestWrongHeaders:
    @pytest.mark.parametrize(
        ("header", "expected"),
        [
            ("", "Expecting value"),
            ("[]", "not a JSON object"),
            ("null", "not a JSON object"),
            ("{} {}", "Extra data"),
            (b"\xff{}", "can't decode byte"),
            (b"\xef\xbb\xbf{}", "BOM"),
            ("{}".encode("utf-16"), "can't decode byte"),
            ("[" * 100_000, "nested too deeply"),
            ('{"w":' * 100_000, "nested too deeply"),
            ('{"w": ' + "9" * 5000 + "}", "4300 digits"),
            ('{"w": NaN}', "NaN"),
            ('{"w": -Infinity}', "Infinity"),
            ('{"w": -0}', "-0"),
            ('{"w": {"dtype": "U8", "dtype": "U8"}}', "dtype comes twice"),
            ('{"w": 1, "v": 2, "w": 1}', "w comes twice"),
            ('{"\\ud800": {}}', r"name '\\ud800' is not valid Unicode"),
            ('{"a\nb": {}}', "control character"),
            ('{"__metadata__": []}', "__metadata__"),
            ('{"__metadata__": {"a": 1}}', "__metadata__"),
            ('{"__metadata__": {"a": "\\udc00"}}', "__metadata__"),
            ('{"w": []}', "w is not described by a JSON object"),
            ('{"w": {}}', "w has no dtype"),
            ('{"w": {"\\ud800": 1}}', r"w has the unknown field '\\ud800'"),
            ('{"w": {"extra": ' + "[" * 200 + "]" * 200 + "}}", "w has the unknown field extra"),
        ],
    )
    def test_malformed(self, tmp_path, write_raw, refused, header, expected):
        assert_matches(refused(write_raw(tmp_path / "m.safetensors", header)), expected)

    @pytest.mark.parametrize(
        ("dtype", "shape", "offsets", "expected"),
        [
            ("F6_E2M3", [4], [0, 3], "w is F6_E2M3, a 6-bit float"),
            ("F6_E3M2", [4], [0, 3], "w is F6_E3M2, a 6-bit float"),
            ("C128", [1], [0, 16], "w has the unknown dtype C128"),
            ("f32", [1], [0, 4], "unknown dtype f32"),
            ("F3\n2", [1], [0, 4], r"unknown dtype 'F3\\n2'"),
            (["F32"], [1], [0, 4], "no dtype"),
            (None, [1], [0, 4], "no dtype"),
            ("U8", [-1], [0, 1], "shape of tensor w"),
            ("U8", [1.0], [0, 1], "shape of tensor w"),
            ("U8", [True], [0, 1], "shape of tensor w"),
            ("U8", ["1"], [0, 1], "shape of tensor w"),
            ("U8", [[1]], [0, 1], "shape of tensor w"),
            ("U8", 1, [0, 1], "shape of tensor w"),
            ("U8", None, [0, 1], "shape of tensor w"),
            ("U8", [2**63], [0, 1], "shape of tensor w"),
            ("U8", [2**62, 2**62, 0], [0, 0], "more than 9223372036854775807 elements"),
            ("U8", [1], [0], "1 data_offsets, not 2"),
            ("U8", [1], [0, 1, 1], "3 data_offsets, not 2"),
            ("U8", [1], [-1, 0], "data_offsets of tensor w"),
            ("U8", [1], [0, None], "data_offsets of tensor w"),
            ("U8", [1], None, "data_offsets of tensor w"),
            ("U8", [2], [0, 1], r"U8\[2\] takes 2 bytes, and its data_offsets \[0, 1\] span 1"),
            ("F32", [2, 2], [0, 8], r"F32\[2, 2\] takes 16 bytes.* span 8"),
            ("U8", [1], [1, 0], "span -1"),
            ("U8", [0], [3, 3], "leaves a gap: it starts at byte 3 of the data, not at 0"),
            ("U8", [9], [0, 9], "truncated: the tensors take 9 bytes of data.* holds 1"),
            ("F4", [3], [0, 1], r"F4\[3\] has no even last dimension"),
            ("F4", [2, 1], [0, 1], r"F4\[2, 1\] has no even last dimension"),
            ("F4", [], [0, 0], r"F4\[\] has no even last dimension"),
        ],
    )
    def test_a_wrong_tensor_is_named(
        self, tmp_path, write_raw, entry, refused, dtype, shape, offsets, expected
    ):
        header = {"w": entry(dtype, shape, offsets)}
        message = refused(write_raw(tmp_path / "m.safetensors", header, b"x"))
        assert_matches(message, expected)
        assert_matches(message, "download or save it again")

    def test_tensors_must_tile_the_data(self, tmp_path, write_raw, entry, refused):
        path = tmp_path / "m.safetensors"
        gap = {"a": entry("U8", [1], [0, 1]), "b": entry("U8", [1], [2, 3])}
        assert_matches(refused(write_raw(path, gap, b"123")), "b leaves a gap.* byte 2.* not at 1")
        overlap = {"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [1, 3])}
        assert_matches(refused(write_raw(path, overlap, b"123")), "b overlaps.* byte 1.* not at 2")
        inside = {"a": entry("U8", [3], [0, 3]), "b": entry("U8", [0], [1, 1])}
        assert_matches(refused(write_raw(path, inside, b"123")), "b overlaps")

    def test_a_product_of_many_huge_numbers_is_not_computed(
        self, tmp_path, write_raw, entry, refused
    ):
        header = {"w": entry("U8", [2**62] * 200_000, [0, 1])}
        message = refused(write_raw(tmp_path / "m.safetensors", header, b"x"))
        assert_matches(message, "more than 9223372036854775807 elements")

    def test_a_message_is_short_and_one_line_whatever_the_name(
        self, tmp_path, write_raw, entry, refused
    ):
        header = {"\r\n\x1b[31m" * 100_000: entry("U8", [2], [0, 1])}
        assert len(refused(write_raw(tmp_path / "m.safetensors", header, b"x"))) < 2000


def assert_one_line(error: SourceError) -> None:
    assert str(error).isprintable()


def assert_matches(text: str, pattern: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"


NAMES = st.text(max_size=3) | st.sampled_from(["w", "__metadata__", "\ud800", "a\nb"])
TENSOR_NAMES = st.text("ab.0", max_size=3) | st.sampled_from(["w", "層.重み", "a b"])
INTEGERS = st.integers(0, 20) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**50])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | NAMES | st.sampled_from([*_DTYPES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def headers(draw) -> tuple[dict[str, object], int]:
    """A sound header, and the size of the data that it describes."""
    header: dict[str, object] = {}
    position = 0
    for name in draw(st.lists(TENSOR_NAMES, max_size=4, unique=True)):
        dtype = draw(st.sampled_from([*_DTYPES]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if dtype == "F4":
            shape = [*shape, 2 * draw(st.integers(0, 2))]
        size = _DTYPES[dtype].itemsize
        for length in shape:
            size *= length
        size //= 2 if dtype == "F4" else 1
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    return header, position


@st.composite
def files(draw) -> bytes:
    """The bytes of a file that is sound, or nearly, or not at all."""
    header, data_size = draw(headers())
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*header, "__metadata__", "new"]))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra", None]))
        value = draw(JSON_VALUES)
        if field is not None and isinstance(header.get(name), dict):
            header[name] = {**header[name], field: value}
        else:
            header[name] = value
    raw = bytearray(json.dumps(header).encode())
    for _ in range(draw(st.integers(0, 2)) if draw(st.booleans()) else 0):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    length = max(len(raw) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 8])), 0)
    data_size = max(data_size + draw(st.sampled_from([0, 0, 0, 0, 1, -1])), 0)
    return struct.pack("<Q", length) + bytes(raw) + bytes(data_size)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.safetensors"


class TestAgainstSafetensors:
    """safetensors' own reader as the judge: we may be stricter, never more lenient."""

    @FUZZ
    @given(content=files() | st.binary(max_size=300))
    def test_only_our_errors_and_never_more_lenient(self, scratch, content):
        scratch.write_bytes(content)
        theirs = judged_by_safetensors(scratch)
        try:
            ours = {spec.name: spec.shape for spec in specs_of(scratch)}
        except SourceError as error:
            assert_one_line(error)
        else:
            assert ours == theirs

    @FUZZ
    @given(made=headers())
    def test_what_is_sound_is_taken(self, scratch, write_raw, made):
        header, data_size = made
        write_raw(scratch, header, bytes(data_size))
        theirs = judged_by_safetensors(scratch)
        assert theirs is not None
        if header:
            assert {spec.name: spec.shape for spec in specs_of(scratch)} == theirs


def judged_by_safetensors(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes by name, in torch's terms, or None for a file that safetensors rejects."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except Exception:
        return None
    return {
        name: (*shape[:-1], shape[-1] // 2) if dtype == "F4" else tuple(shape)
        for name, (dtype, shape) in shapes.items()
    }
