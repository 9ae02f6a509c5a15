"""The chart is XML whatever the texts are, and its bars are as long as they say."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from streamer.bench.chart import rate, write_chart
from streamer.bench.measure import BROADCAST, PUSH, READ, Row
from streamer.bench.result import Result

SVG = "{http://www.w3.org/2000/svg}"


def chart(rows: list[Row], notes: list[str], path: Path) -> ElementTree.Element:
    write_chart(Result({}, {}, rows=rows), notes, path)
    return ElementTree.parse(path).getroot()


def row(stage: str, rate: float) -> Row:
    return Row(stage, '1 <thread> & "more"', 1, int(rate * 1e9), (1.0,))


def test_labels_figures_and_lengths(tmp_path: Path) -> None:
    rows = [row(READ, 8), row(BROADCAST, 2), row(PUSH, 1)]
    root = chart(rows, ["<script>alert(1)</script>", "größer & kleiner"], tmp_path / "a.svg")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for expected in (
        "<script>alert(1)</script>",
        "größer & kleiner",
        'read, 1 <thread> & "more"',
        "8.00",
        "2.00",
        "1.00",
        "bound: broadcast",
    ):
        assert expected in texts
    assert "<script" not in (tmp_path / "a.svg").read_text()
    bars = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if "rx" in bar.attrib]
    assert bars == pytest.approx([bars[2] * 8, bars[2] * 2, bars[2]], rel=0.01)
    (line,) = (line for line in root.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib)
    first = next(bar for bar in root.iter(f"{SVG}rect") if "rx" in bar.attrib)
    assert float(line.attrib["x1"]) == pytest.approx(float(first.attrib["x"]) + bars[1], abs=0.2)


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.3, 99.9, 363.0])
def test_everything_is_inside(tmp_path: Path, top: float) -> None:
    root = chart([row(READ, top), row(PUSH, top / 3)], [], tmp_path / "a.svg")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for bar in root.iter(f"{SVG}rect"):
        if "rx" in bar.attrib:
            assert float(bar.attrib["x"]) + float(bar.attrib["width"]) < width - 40
            assert float(bar.attrib["y"]) + float(bar.attrib["height"]) < height - 20
    ticks = [line for line in root.iter(f"{SVG}line") if "stroke-dasharray" not in line.attrib]
    assert 3 <= len(ticks) <= 8


def test_without_rows_it_is_a_chart_all_the_same(tmp_path: Path) -> None:
    assert chart([], ["nothing"], tmp_path / "a.svg").tag == f"{SVG}svg"


@pytest.mark.parametrize(("value", "shown"), [(1.234, "1.23"), (12.34, "12.3"), (347.2, "347")])
def test_rates_have_three_digits(value: float, shown: str) -> None:
    assert rate(row(READ, value)) == shown
