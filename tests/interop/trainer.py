"""A trainer that stops midway: trainer.py URL CHECKPOINT BUFFER_SIZE.

Prints a line once half of the tensors have been handed over, and then hangs inside its source.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import streamer


class Stuck(streamer.WeightSource):
    def __init__(self, inner: streamer.WeightSource) -> None:
        self._inner = inner

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return self._inner.specs()

    def __iter__(self) -> Iterator[tuple[str, streamer.Payload]]:
        half = len(self.specs()) // 2
        for index, pair in enumerate(self._inner):
            if index == half:
                time.sleep(0.5)  # the chunks before this one are on their way
                print("midway", flush=True)
                time.sleep(600)
            yield pair


if __name__ == "__main__":
    url, checkpoint, buffer_size = sys.argv[1:]
    source = streamer.open_source(checkpoint)
    streamer.push(Stuck(source), to=url, buffer_size=int(buffer_size))
