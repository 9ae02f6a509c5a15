"""The source through the cache: each file is streamed once it is there, the next ones download."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants
from streamer_safetensors.file import OpenFile, StoredTensor, WeightFile
from streamer_safetensors.folder import Layout
from streamer_safetensors.header import read_header
from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError
from streamer.source import TensorSpec, WeightSource
from streamer_huggingface.cache import Cache
from streamer_huggingface.downloads import Downloads
from streamer_huggingface.headers import read_headers
from streamer_huggingface.hub import download, list_files
from streamer_huggingface.layout import cached_layout, find_layout
from streamer_huggingface.ranges import RangeClient, RemoteFile
from streamer_huggingface.target import Target

_HEADER_CONNECTIONS = 16


class CachedSource(WeightSource):
    """A model on the Hub, read from the cache of ``huggingface_hub``.

    Opening asks the Hub nothing if the revision is a commit and all of it is in the cache, or if
    HF_HUB_OFFLINE is set. Headers of files that are not there yet come by range requests. A pass
    starts to download what is missing, and stops when it is closed.
    """

    def __init__(self, target: Target, cache: Cache, at_once: int, *, download_first: bool) -> None:
        """See `streamer_huggingface.open_hub`."""
        self._target = target
        self._cache = cache
        self._at_once = at_once
        self._closed = False
        self._running: list[Downloads] = []
        self._files = ExitStack()
        self._announced: dict[RemoteFile, list[StoredTensor]] = {}
        """Files that were not in the cache at the opening, and what their headers say."""
        self._arrived: dict[RemoteFile, OpenFile] = {}
        try:
            layout = self._from_cache() or self._from_hub()
            if download_first:
                self._download(layout)
            self._tensors = self._read_headers(layout)
        except BaseException:
            self.close()
            raise
        self.weight_version = target.path.version(self._commit)
        self._specs = tuple(tensor.spec for tensor in self._tensors)
        self._remember()

    # -- opening -----------------------------------------------------------------------------

    def _from_cache(self) -> Layout[str] | None:
        """The layout, if the Hub need not or must not be asked for it."""
        offline = constants.HF_HUB_OFFLINE
        commit = self._cache.commit()
        if not offline and not self._target.path.pinned:
            return None
        if commit is None:
            raise self._target.error(
                "HF_HUB_OFFLINE is set, and this revision is not in the cache "
                f"{shown(self._cache.folder)}",
                "unset it, or download the model first: hf download",
            )
        self._commit = commit
        layout = cached_layout(self._target, self._cache.files(commit), self._read_index)
        missing = [name for name in layout.files if not self._path(name)] if layout else []
        if layout is not None and not missing:
            return layout
        if not offline:
            return None
        problem = (
            f"{len(missing)} of the {len(layout.files)} files of the model are not in the cache: "
            f"{', '.join(map(shown, missing))}"
            if layout
            else "the files in the cache do not tell which ones make up the model: name the one, "
            "hf://org/name/file.safetensors"
        )
        raise self._target.error(
            f"HF_HUB_OFFLINE is set, and {problem}",
            f"unset it, or download the model first, at commit {commit}: hf download",
        )

    def _from_hub(self) -> Layout[str]:
        commit, names = list_files(self._target)
        self._commit = commit
        return find_layout(self._target, names, self._read_index)

    def _read_index(self, name: str) -> bytes:
        path = self._path(name)
        if path is None:
            path = Path(download(self._target, self._commit, name, str(self._cache.folder)))
        with closing(OpenFile(path)) as file:
            return file.read(0, file.size)

    def _path(self, name: str) -> Path | None:
        return self._cache.file(self._commit, name)

    def _download(self, layout: Layout[str]) -> None:
        missing = [name for name in layout.files if not self._path(name)]
        with self._downloading(missing) as downloads:
            for name in missing:
                assert downloads is not None
                downloads.wait(name)

    def _read_headers(self, layout: Layout[str]) -> list[StoredTensor]:
        headers: dict[str, list[StoredTensor]] = {}
        for name in layout.files:
            path = self._path(name)
            if path is not None:
                headers[name] = read_header(self._open(path))
        missing = [name for name in layout.files if name not in headers]
        with closing(RangeClient(self._target, self._commit, _HEADER_CONNECTIONS)) as client:
            for file, tensors in read_headers(client, missing, _HEADER_CONNECTIONS):
                self._announced[file] = headers[file.name] = tensors
        with self._target.named():
            return layout.gather("the repository", ((name, headers[name]) for name in layout.files))

    def _open(self, path: Path) -> OpenFile:
        return self._files.enter_context(closing(OpenFile(path)))

    # -- passes ------------------------------------------------------------------------------

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Computed once, at the opening."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        if self._closed:
            raise SourceError(f"cannot read {self._target}: the source was closed")
        missing = [file.name for file in self._announced if file not in self._arrived]
        with self._downloading(missing) as downloads:
            file: WeightFile | None = None
            for tensor in self._tensors:
                if tensor.file is not file:
                    file = tensor.file
                    here = self._wait(file, downloads)
                    here.check_unchanged()
                yield tensor.spec.name, replace(tensor, file=here)

    def progress(self) -> int:
        """See `WeightSource.progress`."""
        told = sum(downloads.progress() for downloads in list(self._running))
        return self._cache.arriving() + told

    @contextmanager
    def _downloading(self, names: Sequence[str]) -> Iterator[Downloads | None]:
        """Download ``names`` inside the block. No process is started for nothing."""
        if not names:
            yield None
            return
        downloads = Downloads(
            self._target, self._commit, names, str(self._cache.folder), self._at_once
        )
        self._running.append(downloads)
        try:
            yield downloads
        finally:
            self._running.remove(downloads)
            downloads.close()

    def _wait(self, file: WeightFile, downloads: Downloads | None) -> OpenFile:
        """``file`` on disk, once it is there; its header must be the one that was announced."""
        if isinstance(file, OpenFile):
            return file
        assert isinstance(file, RemoteFile)
        if file not in self._arrived:
            assert downloads is not None
            here = self._open(downloads.wait(file.name))
            announced = [(tensor.spec, tensor.offset) for tensor in self._announced[file]]
            if [(tensor.spec, tensor.offset) for tensor in read_header(here)] != announced:
                raise self._target.error(
                    f"the header of {here} is not the one that {file} had on the Hub when the "
                    "source was opened",
                    "remove that file from the cache, and open the source again",
                )
            self._arrived[file] = here
            self._remember()
        return self._arrived[file]

    def _remember(self) -> None:
        """Note the commit for when there is no network, if all of the model is in the cache: until
        then the one before it is of more use."""
        if len(self._arrived) == len(self._announced):
            self._cache.remember(self._commit)

    def close(self) -> None:
        """Stop the downloads and close the files; reading raises `SourceError` from now on."""
        self._closed = True
        for downloads in list(self._running):
            downloads.close()
        self._files.close()
