"""Write docs/reference/cli.md from the functions of the commands: run it without arguments."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

import streamer.cli

FILE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
ORDER = ("push", "plan", "doctor", "sources", "serve", "demo", "bench")
HEAD = """# Command line

Written by `python scripts/cli_reference.py`. `streamer COMMAND --help` shows the same. Options of
`streamer` itself come before the command; `--debug` is taken anywhere.
"""
TAIL = """## How a command ends

Exit code 0: done. 1: an error. 2: wrong usage. 129: SIGHUP (the terminal is gone). 130: Ctrl-C.
141: nobody reads the output any more, as in a pipe to `head`. 143: SIGTERM. An error is one line on
stderr, and one more for each thing that went wrong while it was tidied up. Where all is done but
the timeline of `--trace` cannot be written, the report is printed, the error says so, and the exit
code is 1. What a command prints goes to stdout; in a pipe it has no colours, frames or progress,
and its tables have tabs.
"""


def commands() -> dict[str, Callable[..., None]]:
    """The function of each command, in the order of the page."""
    names = {module.name for module in pkgutil.iter_modules(streamer.cli.__path__)}
    names = {name for name in names if not name.startswith("_")}
    listed = [*ORDER, *sorted(names - set(ORDER))]
    return {name: getattr(importlib.import_module(f"streamer.cli.{name}"), name) for name in listed}


def reference() -> str:
    """The page."""
    parts = [HEAD, section("streamer", streamer.cli._streamer)]
    parts += [section(f"streamer {name}", command) for name, command in commands().items()]
    return "\n".join([*parts, TAIL])


def section(title: str, command: Callable[..., None]) -> str:
    """What a command does, and its arguments by the panels of its help."""
    paragraphs = [
        f"```sh\n{paragraph.removeprefix('Example: ')}\n```"
        if paragraph.startswith("Example: ")
        else paragraph
        for paragraph in inspect.cleandoc(command.__doc__ or "").split("\n\n")
    ]
    lines = [f"## {title}\n", "\n\n".join(paragraphs)]
    panels: dict[str, list[str]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *infos = get_args(hints[name]) or (None,)  # the context is no argument
        if infos:
            panel = infos[0].rich_help_panel or ""
            panels.setdefault(panel, []).append(row(name, kind, infos[0], parameter.default))
    for panel in sorted(panels, key=bool):
        lines.append(f"\n| {panel or 'option'} | default | |\n|---|---|---|")
        lines += panels[panel]
    return "\n".join(lines) + "\n"


def row(name: str, kind: Any, info: Any, default: Any) -> str:
    """An option or argument, its default, and what it is for."""
    kinds = [each for each in get_args(kind) or (kind,) if isinstance(each, type)]
    choices = issubclass(kinds[0], Enum) and not info.metavar
    shown = name.upper()
    if isinstance(info, OptionInfo):
        shown = f"--{name.replace('_', '-')}"
        if choices:
            shown += " " + "|".join(each.value for each in kinds[0])
        elif kind is not bool:
            shown += f" {info.metavar}"
    elif info.metavar:
        shown = info.metavar
    value = ""
    if default is inspect.Parameter.empty:
        value = "required"
    elif default is not None and kind is not bool:
        value = f"`{getattr(default, 'value', default)}`"
    variable = f" Also the variable `{info.envvar}`." if info.envvar else ""
    words = (info.help or "").replace("\\", r"\\").replace("*", r"\*")
    cells = (f"`{shown}`", value, words + variable)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    FILE.write_text(reference())
