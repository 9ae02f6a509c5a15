"""What commands print on stdout: tables for a terminal, whole lines for a pipe, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def one_line(text: object) -> str:
    """``text`` without anything that would break a line or command the terminal."""
    joined = " ".join(str(text).split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in joined
    )


def on_terminal() -> bool:
    """Whether somebody looks at stdout."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Exactly one JSON object on one line."""
    print(json.dumps(value))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print a line a fact: names in a column of their own on a terminal, before a tab in a pipe."""
    if not on_terminal():
        for name, fact in facts.items():
            print(f"{name}\t{one_line(fact)}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(Text(name, "bold cyan"), Text(one_line(fact)))
    Console().print(grid)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print ``rows`` under ``columns``.

    On a terminal a table that fits its width; in a pipe a whole line a row, cells between tabs,
    and no heading. A column whose name starts with ``>`` is aligned to the right.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    if not on_terminal():
        for row in cells:
            print("\t".join(row))
        return
    draw_table(columns, cells)


def draw_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a heading, whatever stdout is. For the columns see `print_table`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold cyan")
    for index, name in enumerate(columns):
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=name.startswith(">") or index == 0,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
