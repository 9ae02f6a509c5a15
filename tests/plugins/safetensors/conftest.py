"""Checkpoints written by hand, and the one way these tests ask for an error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamer_safetensors import SafetensorsSource

from streamer import SourceError

WriteRaw = Callable[..., Path]


@pytest.fixture(scope="session")
def write_raw() -> WriteRaw:
    """Write a file of any header (an object to dump, text or bytes) and any data."""

    def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
        if not isinstance(header, (str, bytes)):
            header = json.dumps(header)
        raw = header.encode() if isinstance(header, str) else header
        path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
        return path

    return write


@pytest.fixture(scope="session")
def entry() -> Callable[[str, Any, Any], dict[str, Any]]:
    """One tensor of a header."""
    return lambda dtype, shape, offsets: {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": offsets,
    }


@pytest.fixture(scope="session")
def refused() -> Callable[[Path | str], str]:
    """The message with which opening a path fails: one line that names it.

    The folder above it is cut out, for it is called after the test.
    """

    def message(path: Path | str) -> str:
        with pytest.raises(SourceError) as caught:
            SafetensorsSource(path)
        text = str(caught.value)
        assert text.isprintable(), text
        assert str(path) in text
        return text.replace(f"{Path(path).parent}/", "")

    return message
