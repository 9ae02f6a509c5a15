"""The source without a cache: from range requests straight into the broadcaster's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from streamer_safetensors.file import StoredTensor

from streamer.exceptions import SourceError
from streamer.source import TensorSpec, WeightSource
from streamer_huggingface.headers import read_headers
from streamer_huggingface.hub import list_files
from streamer_huggingface.layout import find_layout
from streamer_huggingface.ranges import RangeClient, RemoteFile
from streamer_huggingface.readahead import AheadFile, ReadAhead
from streamer_huggingface.target import Target
from streamer_huggingface.web import Span


class DirectSource(WeightSource):
    """A model on the Hub, of which nothing is ever written to disk.

    Bytes are fetched when the broadcaster's threads ask for them, ``connections`` requests at
    once. Every pass fetches them afresh.
    """

    def __init__(self, target: Target, connections: int) -> None:
        """See `streamer_huggingface.open_hub`."""
        commit, names = list_files(target)
        self._target = target
        self._closed = False
        self._client = RangeClient(target, commit, connections)
        try:
            layout = find_layout(target, names, self._client.whole)
            found = read_headers(self._client, layout.files, connections)
            with target.named():
                self._tensors = layout.gather(
                    "the repository", ((file.name, tensors) for file, tensors in found)
                )
        except BaseException:
            self._client.close()
            raise
        self.weight_version = target.path.version(commit)
        self._specs = tuple(tensor.spec for tensor in self._tensors)
        self._runs = {file: _runs(self._tensors, file) for file, _ in found}

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Computed once, at the opening."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        if self._closed:
            raise SourceError(f"cannot read {self._target}: the source was closed")
        ahead = ReadAhead()
        files: dict[object, AheadFile] = {
            file: ahead.of(file, runs) for file, runs in self._runs.items()
        }
        for tensor in self._tensors:
            yield tensor.spec.name, replace(tensor, file=files[tensor.file])

    def progress(self) -> int:
        """See `WeightSource.progress`."""
        return self._client.progress()

    def close(self) -> None:
        """End all requests; iterating and reading raise `SourceError` from now on."""
        self._closed = True
        self._client.close()


def _runs(tensors: Iterable[StoredTensor], file: RemoteFile) -> list[Span]:
    """The stretches of ``file`` that ``tensors`` fill, which are in the order of their bytes."""
    runs: list[Span] = []
    for tensor in tensors:
        if tensor.file is not file or not tensor.spec.nbytes:
            continue
        start, stop = tensor.offset, tensor.offset + tensor.spec.nbytes
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
