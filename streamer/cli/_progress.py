"""What a terminal shows while a push is under way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from streamer.events import ChunkSent, Event, SyncStarted


def _watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on, and a function to change it.

    Wiped at the end of the block. Silent if stderr is not a terminal.
    """
    if not _watched():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as line:
        yield line.update


@contextlib.contextmanager
def push_progress() -> Iterator[Callable[[Event], None]]:
    """Gives an ``on_event`` that draws a bar on stderr, which is wiped at the end of the block.

    Bytes, rate and time left; until the first byte a spinner. Silent if stderr is not a terminal.
    """
    if not _watched():
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    task = bar.add_task("sending", start=False, total=None)
    connecting = console.status("opening the source, connecting to the servers ...")

    def on_event(event: Event) -> None:
        if isinstance(event, SyncStarted):
            connecting.stop()
            bar.update(task, total=event.bytes)
            bar.start_task(task)
            bar.start()
        elif isinstance(event, ChunkSent):
            last = event.bytes == event.total_bytes
            bar.update(
                task,
                completed=event.bytes,
                description="finishing" if last else "sending",
            )

    connecting.start()
    try:
        yield on_event
    finally:
        connecting.stop()
        bar.stop()
