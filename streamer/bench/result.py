"""What a bench has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamer.bench.measure import PUSH, READ, Row


@dataclass
class Result:
    """Rows in the order in which they were measured.

    ``left_out`` and ``failed`` say why of stages that have none, or not all. ``source`` has
    ``name``, ``tensors``, ``bytes`` and ``synthetic``.
    """

    machine: dict[str, Any]
    versions: dict[str, str | None]
    source: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def fastest(self, stage: str, device: str | None = None) -> Row | None:
        """The fastest setting of ``stage``; with ``device`` of those that move bytes there."""
        rows = [row for row in self.rows if row.stage == stage and device in (None, row.device)]
        return max(rows, key=lambda row: row.gb_per_s, default=None)

    @property
    def push(self) -> Row | None:
        """The fastest push."""
        return self.fastest(PUSH)

    @property
    def bound(self) -> Row | None:
        """The stage that is slowest at its fastest setting: no push can be faster.

        Only of stages that the bytes of the push pass: to a worker on a GPU no Gloo, and the other
        way round.
        """
        device = self.push.device if self.push is not None else None
        stages = dict.fromkeys(row.stage for row in self.rows if row.stage != PUSH)
        best = [self.fastest(stage, None if stage == READ else device) for stage in stages]
        return min((row for row in best if row), key=lambda row: row.gb_per_s, default=None)

    @property
    def of_bound(self) -> float | None:
        """The rate of the fastest push as a part of the bound's."""
        if self.push is None or self.bound is None:
            return None
        return self.push.gb_per_s / self.bound.gb_per_s

    def as_json(self) -> dict[str, Any]:
        """The object that ``streamer bench --json`` prints."""
        return {
            "machine": self.machine,
            "versions": self.versions,
            "source": self.source,
            "rows": [
                {
                    "stage": row.stage,
                    "setting": row.setting,
                    "value": row.value,
                    "detail": row.detail,
                    "device": row.device,
                    "bytes": row.nbytes,
                    "seconds": [round(seconds, 6) for seconds in row.seconds],
                    "median": round(row.median, 6),
                    "gb_per_s": round(row.gb_per_s, 3),
                }
                for row in self.rows
            ],
            "left_out": self.left_out,
            "failed": self.failed,
            "bound": _named(self.bound),
            "end_to_end": _named(self.push),
            "of_bound": None if self.of_bound is None else round(self.of_bound, 3),
        }


def _named(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "stage": row.stage,
        "setting": row.setting,
        "value": row.value,
        "gb_per_s": round(row.gb_per_s, 3),
    }
