"""Files that a command writes beside its output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamer.cli._output import one_line
from streamer.exceptions import UsageError

if TYPE_CHECKING:
    from streamer.trace import Trace


def check_writable(path: Path, option: str) -> None:
    """Raise `UsageError` naming ``option`` unless ``path`` can be written. Leaves it empty if new.

    For before the work: an hour later nobody wants to hear it.
    """
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{option}: cannot write {one_line(path)}: {error.strerror}") from error


@contextlib.contextmanager
def tracing(path: Path | None) -> Iterator[Trace]:
    """A trace of the block, written to ``path`` at its end, also where the block fails."""
    from streamer.trace import Trace

    if path is None:
        yield Trace()
        return
    check_writable(path, "--trace")
    trace = Trace(enabled=True)
    try:
        yield trace
    finally:
        trace.write(path)
