"""docs/errors.md: every class, every message of the code, and no message that the code has not.

A message is an f-string or a string. What it puts in is a gap here, and ``…`` on the page; the page
may quote a part.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamer
from streamer.exceptions import StreamerError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
GAP = "\0"
RAISED = {"error"} | {
    name for name, value in vars(streamer.exceptions).items()
    if isinstance(value, type) and issubclass(value, StreamerError)
}  # fmt: skip
NOT_MET = {
    "streamer/testing/": "only tests use it",
    "leaving": "holds notes, and is never raised",
}
FEW = 4
"""A message with fewer letters of its own is all gaps: another one is quoted in it."""


def sources() -> list[Path]:
    return sorted([*ROOT.glob("streamer/**/*.py"), *ROOT.glob("plugins/**/*.py")])


def template(node: ast.AST, names: dict[str, str]) -> str:
    """The text of an expression, with a gap for each part that is known only when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, names) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, names) + template(right, names)
        case _:
            return GAP


def module_texts(tree: ast.Module) -> dict[str, str]:
    """The constants of a module that are texts."""
    return {
        target.id: template(statement.value, {})
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
        and isinstance(statement.value, ast.Constant | ast.JoinedStr)
    }


def texts() -> Iterator[str]:
    """Every string of the code."""
    for path in sources():
        tree = ast.parse(path.read_text())
        names = module_texts(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield template(node, names)


def raised() -> Iterator[tuple[str, str]]:
    """Where and with what text an error is made."""
    for path in sources():
        tree = ast.parse(path.read_text())
        names = module_texts(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = template(node.args[0], names)
            where = path.relative_to(ROOT).as_posix()
            skipped = text in NOT_MET or any(where.startswith(prefix) for prefix in NOT_MET)
            if called in RAISED and not skipped and len(re.findall(r"[a-z]", text)) >= FEW:
                yield f"{where}:{node.lineno}", text


def quoted() -> list[str]:
    """The messages on the page: what is in backticks in the first column of its tables."""
    found = []
    for table in re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines():
            cell = re.match(r"\| `([^`]+)` \|", row)
            assert cell, f"the first column is a message, in backticks: {row}"
            found.append(cell[1])
    return found


def as_pattern(message: str) -> re.Pattern[str]:
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part]
    return re.compile(rf"[\s{GAP}]*.*?".join(parts), re.DOTALL)


PATTERNS = {message: as_pattern(message) for message in quoted()}


def test_every_class_is_explained() -> None:
    table = PAGE.partition("## The classes")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert explained == RAISED - {"error"}


def test_no_message_is_explained_twice_in_one_table() -> None:
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        rows = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
        assert len(rows) == len(set(rows)), section.partition("\n")[0]


@pytest.fixture(scope="module")
def code() -> list[str]:
    return list(texts())


def test_every_message_is_in_the_code(code: list[str]) -> None:
    absent = [
        message
        for message, pattern in PATTERNS.items()
        if not any(pattern.search(text) for text in code)
    ]
    assert absent == []


def held() -> Iterator[tuple[str, str]]:
    """What a driver says that a server holds."""
    for path in sorted(ROOT.glob("streamer/drivers/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Return) and node.value is not None:
                text = template(node.value, {})
                if text.startswith(("holds ", "has ", "was ")):
                    yield f"{path.name}:{node.lineno}", text


def test_every_message_of_the_code_is_on_the_page() -> None:
    absent = [
        f"{where}: {text.replace(GAP, '…')}"
        for where, text in [*raised(), *held()]
        if not any(pattern.search(text) for pattern in PATTERNS.values())
    ]
    assert absent == []


def test_messages_say_more_than_gaps() -> None:
    assert [message for message in PATTERNS if len(re.findall(r"[a-z]", message)) < FEW] == []
