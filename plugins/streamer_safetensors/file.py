"""An open file that notices when somebody changes it, and the tensors that are read from it."""

from __future__ import annotations

import errno
import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamer.exceptions import SourceError
from streamer.source import DeferredTensor, TensorSpec
from streamer_safetensors.untrusted import shown

_REOPEN = "open the source again once nobody writes to the checkpoint"


class WeightFile(Protocol):
    """Where the bytes of tensors are: a file, or one at the other end of a connection."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""

    def __str__(self) -> str:
        """Its name in an error message."""

    def read(self, start: int, size: int) -> bytes:
        """Bytes ``[start, start + size)``. Raises `SourceError` if they cannot be had."""

    def read_into(self, buffer: memoryview, start: int, what: str) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on. Thread-safe.

        Raises `SourceError`, naming the file and ``what``, also if the file was changed meanwhile.
        """


class OpenFile:
    """A regular file, open until `close`. ``size`` is in bytes, as found at the opening.

    Raises `SourceError` that names the file, and for a broken link its target.
    """

    __slots__ = ("_file", "_status", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                raise SourceError(_not_a_file(path, mode))
            self._file = io.FileIO(path)
        except (OSError, ValueError) as error:
            raise SourceError(_cannot_open(path, error)) from error
        self._status = os.fstat(self._file.fileno())
        self.size = self._status.st_size

    def __str__(self) -> str:
        return shown(self.path)

    def read(self, start: int, size: int) -> bytes:
        """Bytes ``[start, start + size)``. Raises `SourceError` if they cannot be had."""
        data = bytearray(size)
        self.read_into(memoryview(data), start, "the header")
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, what: str) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on. Thread-safe.

        Raises `SourceError`, naming the file and ``what``, also if the file was changed meanwhile.
        """
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._file.fileno(), [buffer[done:]], start + done)
                if count == 0:
                    raise SourceError(
                        f"{self} ended at byte {start + done} inside {what}: "
                        f"it was truncated while it was read; {_REOPEN}"
                    )
                done += count
            self._compare(os.fstat(self._file.fileno()), f" while {what} was read")
        except OSError as error:
            raise SourceError(f"cannot read {what} from {self}: {_reason(error)}") from error
        except ValueError as error:
            raise SourceError(f"cannot read {what} from {self}: the source was closed") from error

    def check_unchanged(self) -> None:
        """Raise `SourceError` unless ``path`` still is this file, as it was at the opening."""
        if self._file.closed:
            raise SourceError(f"cannot read {self}: the source was closed")
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise SourceError(
                f"{self} is gone since its header was read ({_reason(error)}): {_REOPEN}"
            ) from error
        if (status.st_dev, status.st_ino) != (self._status.st_dev, self._status.st_ino):
            raise SourceError(
                f"{self} was replaced by another file since its header was read: {_REOPEN}"
            )
        self._compare(status, " since its header was read")

    def _compare(self, status: os.stat_result, when: str) -> None:
        if status.st_size != self.size:
            raise SourceError(
                f"{self} had {self.size} bytes and has {status.st_size}, changed{when}: {_REOPEN}"
            )
        if status.st_mtime_ns != self._status.st_mtime_ns:
            raise SourceError(f"{self} was rewritten in place{when}: {_REOPEN}")

    def close(self) -> None:
        """Close the file. Reads raise `SourceError` from now on."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class StoredTensor(DeferredTensor):
    """A tensor whose bytes start at byte ``offset`` of ``file``."""

    spec: TensorSpec
    file: WeightFile
    offset: int

    def read_into(self, buffer: memoryview, start: int, stop: int) -> None:
        """See `DeferredTensor.read_into`."""
        self.file.read_into(buffer, self.offset + start, f"tensor {shown(self.spec.name)}")


def broken_link(path: Path) -> str | None:
    """Where ``path`` points to, if it is a link that leads to no file."""
    return shown(os.readlink(path)) if os.path.islink(path) and not os.path.exists(path) else None


def _not_a_file(path: Path, mode: int) -> str:
    if stat.S_ISDIR(mode):
        return (
            f"{shown(path)} is a folder, not a file, as a container mount of a missing file or a "
            "download into a folder of that name leaves: put the file there, or name the folder "
            "that holds the weights"
        )
    return f"{shown(path)} is not a regular file: copy the weights into one"


def _cannot_open(path: Path, error: OSError | ValueError) -> str:
    target = broken_link(path)
    if target is not None:
        return (
            f"{shown(path)} is a link to {target}, which leads to no file: "
            "download or copy the checkpoint again, with the files that its links point to"
        )
    too_many = isinstance(error, OSError) and error.errno == errno.EMFILE
    remedy = " (raise the limit with ulimit -n)" if too_many else ""
    return f"cannot open {shown(path)}: {_reason(error)}{remedy}"


def _reason(error: OSError | ValueError) -> str:
    return shown(error.strerror) if isinstance(error, OSError) else shown(error)
