"""Draw docs/pipeline.svg: the way of the bytes from a source into a worker.

    python scripts/draw_pipeline.py [FILE]

Its colours follow the reader's scheme, light or dark, where the SVG is shown as an image.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parents[1] / "docs" / "pipeline.svg"
WIDTH, HEIGHT = 980, 404
STYLE = """
  .page { fill: #ffffff } .ink { fill: #1f2328 } .dim { fill: #59636e }
  .lane { fill: #f6f8fa; stroke: #d1d9e0 } .box { fill: #ffffff; stroke: #59636e }
  .host { fill: #fff3d6; stroke: #9a6700 } .gpu { fill: #dff3e4; stroke: #1a7f37 }
  .line { stroke: #59636e; fill: none } .wire { stroke: #0969da; fill: none }
  .head { fill: #59636e } .wirehead { fill: #0969da } .wiretext { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .ink { fill: #f0f6fc } .dim { fill: #9198a1 }
    .lane { fill: #151b23; stroke: #3d444d } .box { fill: #0d1117; stroke: #9198a1 }
    .host { fill: #3b2f12; stroke: #d29922 } .gpu { fill: #12351f; stroke: #3fb950 }
    .line { stroke: #9198a1 } .wire { stroke: #4493f8 }
    .head { fill: #9198a1 } .wirehead { fill: #4493f8 } .wiretext { fill: #4493f8 }
  }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines under it."""

    x: int
    y: int
    width: int
    height: int
    kind: str
    title: str
    words: str

    def svg(self) -> str:
        """As elements."""
        middle = self.x + self.width / 2
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" '
            f'class="{self.kind}"/>',
            text(middle, self.y + 22, self.title, "ink", size=14, weight=600),
        ]
        parts += [
            text(middle, self.y + 42 + 17 * number, line, "dim", size=12)
            for number, line in enumerate(self.words.splitlines())
        ]
        return "\n".join(parts)


def text(
    x: float,
    y: float,
    words: str,
    kind: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "middle",
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(points: str, kind: str = "line") -> str:
    """A line through ``points`` with a head at its end."""
    head = "wirehead" if kind == "wire" else "head"
    return f'<path d="M {points}" class="{kind}" stroke-width="1.6" marker-end="url(#{head})"/>'


def lane(y: int, height: int, words: str, at: int = 24) -> str:
    """A background, with what it is about."""
    return (
        f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{height}" rx="8" class="lane"/>'
        + text(at, y + 20, words, "dim", weight=600, anchor="start")
    )


BOXES = (
    Box(24, 92, 140, 112, "box", "source", """specs(), then pairs
of name and payload;
iterated by the
thread that pushes"""),
    Box(212, 92, 146, 112, "host", "pinned slots", """8 MiB each,
filled by 12 readers
from files or
range requests"""),
    Box(448, 92, 180, 112, "gpu", "ring of chunks", """on the GPU that sends;
packed, each tensor at
its planned offset;
2 of the largest"""),
    Box(770, 92, 186, 112, "gpu", "buffer of a chunk", """on every worker's GPU;
tensors are views of it,
in place, and go to
the engine's loader"""),
    Box(24, 300, 334, 82, "box", "session", """checks first; then order, deadlines,
and what a failure leaves behind"""),
    Box(770, 300, 186, 82, "box", "inference server", """paused, and marked as
incomplete, meanwhile"""),
)  # fmt: skip


def draw() -> str:
    """The whole figure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">',
        "<title>The pipeline of a push to GPUs</title>",
        f"<style>{STYLE}</style>",
        *(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" class="{name}"/>'
            "</marker>"
            for name in ("head", "wirehead")
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>',
        lane(10, 224, "bytes: all stages work at once, each on another chunk"),
        lane(246, 148, "calls: while an /update_weights is open, the workers receive", at=210),
        *(box.svg() for box in BOXES),
        arrow("164 148 L 210 148"),
        text(187, 138, "read", "dim"),
        arrow("358 148 L 446 148"),
        text(402, 138, "copy stream", "dim"),
        arrow("94 92 L 94 60 L 538 60 L 538 90"),
        text(316, 52, "a tensor on this GPU: copied there, or sent from where it is", "dim"),
        arrow("628 148 L 768 148", "wire"),
        text(698, 122, "broadcast stream", "dim"),
        text(698, 138, "NCCL, once", "wiretext", weight=600),
        text(698, 168, "one broadcast", "dim"),
        text(698, 184, "a chunk", "dim"),
        arrow("191 300 L 191 222 L 538 222 L 538 206"),
        text(364, 216, "the plan: which bytes travel together", "dim"),
        arrow("358 340 L 768 340", "wire"),
        text(563, 330, "HTTP: pause, start, update, finish, resume", "wiretext", weight=600),
        text(563, 360, "or calls of an engine in this process, or of a Ray actor", "dim"),
        arrow("863 300 L 863 206"),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(draw())
