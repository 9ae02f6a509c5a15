"""Files that a command writes beside its output."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamer.cli._output import one_line
from streamer.exceptions import StreamerError, UsageError

if TYPE_CHECKING:
    from streamer.trace import Trace

log = logging.getLogger("streamer")


def check_writable(path: Path, option: str) -> None:
    """Raise `UsageError` naming ``option`` unless ``path`` can be written. Leaves it empty if new.

    For before the work: an hour later nobody wants to hear it.
    """
    if path == Path():
        raise UsageError(f"{option}: give the name of a file")
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{option}: cannot write {one_line(path)}: {error.strerror}") from error


@contextlib.contextmanager
def tracing(path: Path | None) -> Iterator[Trace]:
    """A trace of the block, written to ``path`` at its end, also where the block fails, unless it
    has recorded nothing by then: what may be in the file is kept.

    Raises `StreamerError` if it cannot be written, but not over an error of the block.
    """
    from streamer.trace import Trace

    if path is None:
        yield Trace(enabled=False)
        return
    check_writable(path, "--trace")
    trace = Trace()
    try:
        yield trace
    except BaseException:
        if not trace.empty:
            try:
                trace.write(path)
            except StreamerError as error:
                log.warning("%s", error)
        raise
    try:
        trace.write(path)
    except StreamerError as error:
        raise StreamerError(f"{error}; the push itself is done") from error
