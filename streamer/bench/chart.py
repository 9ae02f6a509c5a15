"""A bench as a chart, in SVG and without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as xml

from streamer.bench.measure import BROADCAST, COPY, PUSH, READ, STAGE, Row
from streamer.bench.result import Result

_COLORS = {
    READ: "#4c78a8",
    COPY: "#72a0c1",
    STAGE: "#5f8db3",
    BROADCAST: "#e39b45",
    PUSH: "#3a9a6b",
}
_WIDTH, _LEFT, _RIGHT, _TOP = 860, 250, 90, 64
_BAR, _STEP, _GAP, _LINE = 18, 24, 12, 18
_TICKS = 6


def write_chart(result: Result, notes: Sequence[str], path: Path) -> None:
    """Write a bar a row, in GB/s, and a line at the bound, under lines of ``notes``.

    Texts come from anywhere: each must be printable, as XML has no other characters.
    """
    first = _TOP + len(notes) * _LINE
    height = first + len(result.rows) * _STEP + _GAP * len({r.stage for r in result.rows}) + 40
    root = xml.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {height}",
            "width": str(_WIDTH),
            "height": str(height),
            "font-family": "system-ui, sans-serif",
            "font-size": "13",
        },
    )
    xml.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    _text(root, 16, 28, "streamer bench: GB/s, median of repeats", size="17", weight="600")
    for number, note in enumerate(notes):
        _text(root, 16, 50 + number * _LINE, note, color="#666")
    step = _tick(max((row.gb_per_s for row in result.rows), default=1.0))
    ticks = math.ceil(max((row.gb_per_s for row in result.rows), default=1.0) / step)
    scale = (_WIDTH - _LEFT - _RIGHT) / (ticks * step)
    bottom = height - 32
    for tick in range(ticks + 1):
        x = _LEFT + tick * step * scale
        _line(root, x, first - 6, x, bottom, "#e4e4e4")
        _text(root, x, bottom + 18, f"{tick * step:g}", color="#666", anchor="middle")
    bound = result.bound
    if bound is not None:
        x = _LEFT + bound.gb_per_s * scale
        _line(root, x, first - 6, x, bottom, "#c0392b", dash="5 4")
        _text(root, x + 4, first - 10, f"bound: {bound.stage}", color="#c0392b")
    y, stage = first - _GAP, ""
    for row in result.rows:
        y += _GAP if row.stage != stage else 0
        stage = row.stage
        _bar(root, row, y, scale)
        y += _STEP
    path.write_bytes(xml.tostring(root, encoding="utf-8", xml_declaration=True))


def _bar(root: xml.Element, row: Row, y: float, scale: float) -> None:
    width = max(row.gb_per_s * scale, 1.0)
    middle = y + _BAR - 5
    _text(root, _LEFT - 10, middle, f"{row.stage}, {row.setting}", anchor="end")
    attributes = {"x": f"{_LEFT}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{_BAR}"}
    xml.SubElement(root, "rect", {**attributes, "rx": "2", "fill": _COLORS[row.stage]})
    _text(root, _LEFT + width + 6, middle, rate(row))


def rate(row: Row) -> str:
    """GB/s in three digits."""
    digits = 2 if row.gb_per_s < 9.995 else 1 if row.gb_per_s < 99.95 else 0
    return f"{row.gb_per_s:.{digits}f}"


def _tick(top: float) -> float:
    """A round step that reaches ``top`` with at most `_TICKS` of it."""
    power: float = 10.0 ** math.floor(math.log10(top / _TICKS))
    return next(step * power for step in (1, 2, 5, 10) if step * power * _TICKS >= top)


def _text(
    root: xml.Element,
    x: float,
    y: float,
    text: str,
    *,
    color: str = "#222",
    anchor: str = "start",
    size: str = "13",
    weight: str = "400",
) -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": color, "text-anchor": anchor}
    attributes |= {"font-size": size, "font-weight": weight}
    xml.SubElement(root, "text", attributes).text = text


def _line(
    root: xml.Element, x1: float, y1: float, x2: float, y2: float, color: str, dash: str = ""
) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    style = {"stroke": color} | ({"stroke-dasharray": dash} if dash else {})
    xml.SubElement(root, "line", ends | style)
