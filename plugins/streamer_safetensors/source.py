"""The source: every header checked at the opening, every byte read by the broadcaster's threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from streamer.source import TensorSpec, WeightSource
from streamer_safetensors.file import OpenFile, StoredTensor
from streamer_safetensors.folder import find_layout
from streamer_safetensors.header import read_header


class SafetensorsSource(WeightSource):
    """A checkpoint on disk: a safetensors file, a folder of them, or an index.

    Opening reads and checks the header of every file it will read, and keeps these files open
    until `close`. The order is that of the bytes: files by name, tensors by offset. An iterator
    opens nothing of its own; each one first makes sure that no file was replaced or changed since
    the opening, and each read makes sure of it again for the file that it read.

    Raises `SourceError` if the weights are not all there, sound, and under unique names.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        layout = find_layout(path)
        self._files: list[OpenFile] = []
        with ExitStack() as opened:

            def headers() -> Iterator[tuple[Path, list[StoredTensor]]]:
                for file_path in layout.files:
                    file = opened.enter_context(closing(OpenFile(file_path)))
                    self._files.append(file)
                    yield file_path, read_header(file)

            self._tensors = layout.gather(path, headers())
            self._opened = opened.pop_all()
        self._specs = tuple(tensor.spec for tensor in self._tensors)

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Computed once, at the opening."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        for file in self._files:
            file.check_unchanged()
        for tensor in self._tensors:
            yield tensor.spec.name, tensor

    def close(self) -> None:
        """Close the files; iterating and reading raise `SourceError` from now on."""
        self._opened.close()
