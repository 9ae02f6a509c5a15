"""Whatever is given as a source, and whatever is in its files, only errors of ours come out."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from streamer import StreamerError, open_source

pytestmark = pytest.mark.timeout(120)

FUZZ = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(6.0), "b": torch.zeros(0, 3)},
    "model-00002-of-00002.safetensors": {"c": torch.ones(2, 2).bfloat16()},
}
FILES = {name: save(tensors) for name, tensors in SHARDS.items()} | {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {key: name for name, tensors in SHARDS.items() for key in tensors}}
    ).encode()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def no_hub(monkeypatch, tmp_path, free_port):
    """The Hub is nowhere, and its cache empty."""
    for name in [name for name in os.environ if re.match(r"HF_|.*_proxy$", name, re.IGNORECASE)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def read_all(source):
    """Every byte of ``source``, as a push would."""
    for name, payload in source:
        spec = next(spec for spec in source.specs() if spec.name == name)
        buffer = bytearray(spec.nbytes)
        payload.read_into(memoryview(buffer), 0, spec.nbytes)


def damaged(data: bytes, cuts) -> bytes:
    """``data`` with pieces replaced: each cut is a place, a length and what comes there."""
    for at, length, piece in cuts:
        start = at % (len(data) + 1)
        data = data[:start] + piece + data[start + length :]
    return data


CUTS = st.lists(
    st.tuples(
        st.integers(0, 4000),
        st.integers(0, 40),
        st.binary(max_size=12)
        | st.sampled_from(
            [b'"', b"{", b"[[[", b"-1", b"99999999999999999999", b"F64", b"/../", b"0"]
        ),
    ),
    min_size=1,
    max_size=3,
)


@FUZZ
@given(which=st.sampled_from(sorted(FILES)), cuts=CUTS)
def test_a_damaged_checkpoint(folder, which, cuts):
    for name, data in FILES.items():
        (folder / name).write_bytes(damaged(data, cuts) if name == which else data)
    failure: StreamerError | None = None
    try:
        with closing(open_source(folder)) as source:
            read_all(source)
    except StreamerError as error:
        failure = error
    assert failure is None or str(failure).isprintable()
    assert failure is None or str(folder) in str(failure)


REST = st.text(max_size=30) | st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(
        ["", "/", "//", "../", "~", "org/name", "org", "a/b/c/d", ".", "%2e%2e/", "\0"]
    ),
    st.sampled_from(
        ["", "@", "@main", "@a/b", "@@", "?", "?base=", "?base=x&base=y", "?q=%zz", "#f"]
    ),
    st.text(max_size=8),
)
SCHEMES = ["hf", "safetensors", "module", "fsdp", "peft", "nothing", "HF", "", "http", "1", "é"]


@FUZZ
@example(uri="~0")  # nobody's home
@example(uri="\x1b[31m")
@given(uri=st.builds("{}://{}".format, st.sampled_from(SCHEMES), REST) | REST)
def test_uris(no_hub, folder, uri):
    """None of them names anything that is there."""
    here = Path.cwd()
    os.chdir(folder / "..")
    try:
        with pytest.raises(StreamerError) as caught:
            open_source(uri)
    finally:
        os.chdir(here)
    assert str(caught.value).isprintable()


@FUZZ
@given(source=st.none() | st.integers() | st.binary() | st.floats())
def test_objects_that_are_no_source(source):
    with pytest.raises(StreamerError):
        open_source(source)
