"""The headers of files that are still on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from streamer_safetensors.file import StoredTensor
from streamer_safetensors.header import read_header

from streamer_huggingface.ranges import RangeClient, RemoteFile


def read_headers(
    client: RangeClient, names: Sequence[str], connections: int
) -> list[tuple[RemoteFile, list[StoredTensor]]]:
    """The files called ``names``, each with the tensors in it.

    Reads headers only, several at once, and checks them as those of files on disk are. Raises
    `SourceError`; the client is closed then. No thread is left in any case.
    """

    def read(name: str) -> tuple[RemoteFile, list[StoredTensor]]:
        file = client.open(name)
        with client.target.named():
            return file, read_header(file)

    if not names:
        return []
    with ThreadPoolExecutor(min(connections, len(names)), "streamer-hub") as pool:
        try:
            return list(pool.map(read, names))
        except BaseException:
            client.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
