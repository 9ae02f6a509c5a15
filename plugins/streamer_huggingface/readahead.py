"""Neighbouring reads of a remote file, made one request.

The broadcaster reads a tensor at a time, or a part of one. To ask the Hub for each would cost a
round trip for every bias and norm. Here a read that is shorter than a block fetches a whole block,
from which its neighbours are then served; a read at least as long goes straight into the reader's
memory. Each byte is fetched once, whichever threads read in whatever order.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from streamer.exceptions import SourceError
from streamer_huggingface.ranges import RemoteFile
from streamer_huggingface.web import Span

BLOCK_SIZE = 16 << 20
MAX_HELD = 512 << 20
"""Bytes of blocks that wait for their readers. More wait only if tensors are never read, as when
a transform drops them: then the oldest are given up, and would be fetched again."""


class _Block:
    """A stretch of a file, there once ``ready``. ``unread`` of its bytes are still waited for."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.unread = stop - start
        self.data = memoryview(bytearray(stop - start))
        self.ready = threading.Event()
        self.error: SourceError | None = None


class ReadAhead:
    """The blocks of one pass over some files, in which each wanted byte is read once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._blocks: OrderedDict[tuple[RemoteFile, int], _Block] = OrderedDict()
        self._held = 0

    def of(self, file: RemoteFile, runs: Sequence[Span]) -> AheadFile:
        """``file``, of which ``runs`` are wanted, sorted and disjoint."""
        return AheadFile(self, file, runs)

    def put(self, file: RemoteFile, block: _Block) -> None:
        """Keep a block for its readers. The lock is held."""
        self._blocks[file, block.start] = block
        self._held += len(block.data)
        while self._held > MAX_HELD:
            oldest = next((key for key, old in self._blocks.items() if old.ready.is_set()), None)
            if oldest is None:
                return
            self._held -= len(self._blocks.pop(oldest).data)

    def find(self, file: RemoteFile, start: int) -> _Block | None:
        """The block that starts there, if it is still kept. The lock is held."""
        return self._blocks.get((file, start))

    def drop(self, file: RemoteFile, block: _Block, read: int) -> None:
        """``read`` more bytes of a block were read; after the last, or an error, it goes."""
        with self.lock:
            block.unread -= read
            if block.unread <= 0 or block.error is not None:
                known = self._blocks.pop((file, block.start), None)
                self._held -= len(known.data) if known is not None else 0


class AheadFile:
    """A `WeightFile` that is read ahead."""

    def __init__(self, ahead: ReadAhead, file: RemoteFile, runs: Sequence[Span]) -> None:
        self._ahead = ahead
        self._file = file
        self._run_stops = [stop for _, stop in runs]
        # What was asked for so far: disjoint, sorted, never forgotten.
        self._starts: list[int] = []
        self._stops: list[int] = []

    @property
    def size(self) -> int:
        return self._file.size

    def __str__(self) -> str:
        return str(self._file)

    def read(self, start: int, size: int) -> bytes:
        """See `WeightFile.read`."""
        return self._file.read(start, size)

    def read_into(self, buffer: memoryview, start: int, what: str) -> None:
        """See `WeightFile.read_into`."""
        at, stop = start, start + len(buffer)
        while at < stop:
            block, end, ours = self._claim(at, stop)
            piece = buffer[at - start : end - start]
            if block is None:
                self._file.read_into(piece, at, what)
            else:
                if ours:
                    self._fill(block, what)
                self._take(block, at, piece, what)
            at = end

    def _claim(self, at: int, stop: int) -> tuple[_Block | None, int, bool]:
        """Where to read bytes from ``at`` on, up to which byte, and whether to fill that block.

        No block: straight from the file.
        """
        with self._ahead.lock:
            index = bisect_right(self._starts, at)
            if index and at < self._stops[index - 1]:
                block = self._ahead.find(self._file, self._starts[index - 1])
                return block, min(stop, self._stops[index - 1]), False
            end = min(at + BLOCK_SIZE, self._run_stops[bisect_right(self._run_stops, at)])
            if index < len(self._starts):
                end = min(end, self._starts[index])
            self._starts.insert(index, at)
            self._stops.insert(index, end)
            if end <= stop:
                return None, end, True
            block = _Block(at, end)
            self._ahead.put(self._file, block)
            return block, stop, True

    def _fill(self, block: _Block, what: str) -> None:
        try:
            self._file.read_into(block.data, block.start, what)
        except SourceError as error:
            block.error = error
        except BaseException:
            block.error = SourceError(f"reading {what} from {self} was broken off")
            raise
        finally:
            block.ready.set()

    def _take(self, block: _Block, at: int, piece: memoryview, what: str) -> None:
        block.ready.wait()  # whoever fills it always ends
        offset = at - block.start
        if block.error is None:
            piece[:] = block.data[offset : offset + len(piece)]
        self._ahead.drop(self._file, block, len(piece))
        if block.error is not None:
            raise SourceError(str(block.error)) from block.error
