"""The pages, and the snippets on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A fenced block. ``number`` counts those of one language on one page, from 0."""

    page: str
    language: str
    number: int
    heading: str
    code: str

    def __str__(self) -> str:
        return f"{self.page} {self.language} {self.number}"

    @property
    def key(self) -> tuple[str, int]:
        return self.page, self.number


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, and all of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def snippets(*languages: str) -> list[Snippet]:
    """Those of all pages, in these languages."""
    found: list[Snippet] = []
    for path in pages():
        text, page = path.read_text(), path.relative_to(ROOT).as_posix()
        counts: dict[str, int] = {}
        for fence in FENCE.finditer(text):
            language = fence[1]
            heading = (HEADING.findall(text[: fence.start()]) or [""])[-1]
            number = counts[language] = counts.get(language, -1) + 1
            if not languages or language in languages:
                found.append(Snippet(page, language, number, heading, fence[2]))
    return found
