"""A timeline of a sync, for https://ui.perfetto.dev: who worked when, and what overlapped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamer.exceptions import StreamerError

if TYPE_CHECKING:
    import torch


PHASES = "phases"
"""The row of what a `streamer.report.Seconds` counts, one after the other."""


class Trace:
    """Records spans while ``enabled``; otherwise costs next to nothing.

    Host spans are rows of the thread they ran on, but for the phases, which have a row of their
    own. Device spans lie between two points of a CUDA stream, on a row with the stream's name.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._events: list[dict[str, Any]] = []
        self._device: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._base: tuple[float, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """The block as a span of this thread."""
        if not self.enabled:
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, started, **details)

    def add(self, name: str, started: float, *, row: str | None = None, **details: Any) -> None:
        """A span that ends now, from when `time.perf_counter` said ``started``: of this thread, or
        on ``row``."""
        if self.enabled:
            ended = time.perf_counter()
            row = row or threading.current_thread().name
            self._add(name, row, started * 1e6, (ended - started) * 1e6, details)

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded so far."""
        return not self._events and not self._device

    @contextlib.contextmanager
    def device_span(self, name: str, row: str) -> Iterator[None]:
        """What the block enqueues on the current CUDA stream, as a span of the device."""
        if not self.enabled:
            yield
            return
        import torch

        if self._base is None:
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            base.synchronize()
            self._base = (time.perf_counter() * 1e6, base)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._device.append((name, row, begin, end))

    def _add(
        self, name: str, row: str, start: float, duration: float, details: dict[str, Any]
    ) -> None:
        event = {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": os.getpid()}
        self._events.append({**event, "tid": row, "args": details})

    def write(self, path: str | Path) -> None:
        """Write everything so far as Chrome trace JSON. Waits for the device spans to end.

        Raises `StreamerError` naming the file if it cannot be written.
        """
        for name, row, begin, end in self._device:
            assert self._base is not None
            end.synchronize()
            at, base = self._base
            start = at + base.elapsed_time(begin) * 1e3
            self._add(name, row, start, begin.elapsed_time(end) * 1e3, {})
        self._device.clear()
        found = sorted({event["tid"] for event in self._events}, key=_place)
        rows = {row: number for number, row in enumerate(found, start=1)}
        events = [{**event, "tid": rows[event["tid"]]} for event in self._events]
        names = [_metadata("process_name", 0, name="streamer")]
        for row, tid in rows.items():
            names.append(_metadata("thread_name", tid, name=row))
            names.append(_metadata("thread_sort_index", tid, sort_index=tid))
        try:
            Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}))
        except OSError as error:
            raise StreamerError(f"cannot write the timeline {path}: {error.strerror}") from error


def _metadata(kind: str, tid: int, **args: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": os.getpid(), "tid": tid, "args": args}


def _place(row: str) -> tuple[bool, bool, list[tuple[str, int]]]:
    """The phases, then the main thread, then the others by name and number."""
    parts = re.findall(r"(\D*)(\d*)", row)
    return row != PHASES, row != "MainThread", [(text, int(digits or 0)) for text, digits in parts]
