"""Push weights that are kept in a way nobody else knows: here, one NumPy file a tensor.

    streamer serve --port 8000    # in another terminal: wait for its line `ready: ...`
    python examples/custom_source.py weights/ --to http://localhost:8000

A source says what it has, then yields exactly that, in that order. docs/plugins.md goes on from
here, to `streamer push npy://weights`, and to a published package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import streamer
from streamer import TensorSpec, WeightSource


class NumpyFolder(WeightSource):
    """The files ``*.npy`` of a folder; a tensor's name is that of its file."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("*.npy"))

    def specs(self) -> list[TensorSpec]:
        """Only the headers are read: a mapped file costs no memory."""
        return [
            TensorSpec(file.stem, torch.from_numpy(np.empty(0, mapped.dtype)).dtype, mapped.shape)
            for file in self._files
            for mapped in [np.load(file, mmap_mode="r")]
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            yield file.stem, torch.from_numpy(np.load(file))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", required=True)
    arguments = parser.parse_args()
    report = streamer.push(NumpyFolder(arguments.folder), to=arguments.to)
    print(f"{report.tensors} tensors, {report.bytes} bytes, now {report.weight_version}")


if __name__ == "__main__":
    main()
