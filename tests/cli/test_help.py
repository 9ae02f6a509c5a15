"""What the command line says of itself, and how errors end."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, get_type_hints

import pytest
from typer.models import OptionInfo

import streamer.cli
from streamer.exceptions import SourceError, UsageError
from streamer.hookspecs import Register, hookimpl
from streamer.registry import Registry

COMMANDS = [
    module.name
    for module in pkgutil.iter_modules(streamer.cli.__path__)
    if not module.name.startswith("_")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_a_word_on_every_option(
    invoke: Callable[..., Any], command: str
) -> None:
    ended = invoke(command, "--help")
    assert ended.code == 0
    assert f"Example: streamer {command}" in ended.stdout
    group: Any = streamer.cli.make_app().registered_commands
    assert command in [info.name for info in group]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_its_own_name(command: str) -> None:
    # typer 0.27 names an option after its metavar where the two differ in case only: --PORT.
    module = importlib.import_module(f"streamer.cli.{command}")
    hints = get_type_hints(getattr(module, command), include_extras=True)
    infos = {name: hint.__metadata__[0] for name, hint in hints.items() if name != "return"}
    # In an annotation the first name stands where the default stands elsewhere.
    options = {name: info.default for name, info in infos.items() if isinstance(info, OptionInfo)}
    wanted = {name: f"--{name.replace('_', '-')}" for name in options}
    assert options == wanted | ({"options": "--option"} if "options" in options else {})


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_of_any_width(run: Callable[..., Any], command: str) -> None:
    """No paragraph is broken where its source is, and nothing is cut."""
    text = run(command, "--help", COLUMNS="80").stdout
    assert "…" not in text
    function: Any = getattr(importlib.import_module(f"streamer.cli.{command}"), command)
    paragraphs = [" ".join(part.split()) for part in function.__doc__.split("\n\n")]
    said = [line.strip() for line in text.partition("╭")[0].split("\n")]
    lines = iter(line for line in said if line and not line.startswith("Usage:"))
    for paragraph in paragraphs:
        wrapped = textwrap.wrap(paragraph, 78, break_on_hyphens=False)
        assert [next(lines) for _ in wrapped] == wrapped


def test_help_lists_every_command(invoke: Callable[..., Any]) -> None:
    ended = invoke("--help")
    assert (ended.code, ended.stderr) == (0, "")
    for command in COMMANDS:
        assert f" {command} " in ended.stdout


def test_no_command_shows_the_help_and_fails(invoke: Callable[..., Any]) -> None:
    ended = invoke()
    assert ended.code == 2
    assert "Usage: streamer" in ended.stdout


def test_version(invoke: Callable[..., Any]) -> None:
    ended = invoke("--version")
    assert (ended.code, ended.stdout) == (0, f"streamer {version('streamer')}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pusk"], "No such command 'pusk'. Did you mean 'push'? (see streamer --help)"),
        (["--bogus"], "No such option: --bogus"),
        (
            ["plan", "x", "--cast", "bf16"],
            "Invalid value for '--cast': 'bf16' is not one of 'bfloat16', 'float16', 'float32', "
            "'float64': give bfloat16 (see streamer plan --help)",
        ),
        (["sources", "--bogus"], "(see streamer sources --help)"),
        (["plan"], "SOURCE"),
    ],
)
def test_wrong_usage_is_one_line(
    invoke: Callable[..., Any], arguments: list[str], says: str
) -> None:
    ended = invoke(*arguments)
    assert ended.code == 2
    assert says in ended.error


class Faulty:
    """A plugin whose source fails in a way that nobody foresaw."""

    @hookimpl
    def streamer_register_sources(self, register: Register) -> None:
        def open_it(rest: str) -> Any:
            error = ValueError("two\nlines \x1b[31m")
            error.add_note("a note")
            raise error

        register("faulty", open_it)  # type: ignore[arg-type]


def test_an_unforeseen_error_is_one_line_with_its_type(
    invoke: Callable[..., Any], registry: Registry
) -> None:
    registry.add(Faulty())
    ended = invoke("plan", "faulty://x")
    assert ended.code == 1
    assert ended.error == (
        "plugin Faulty (in-process) failed to open faulty://: ValueError: two lines \\x1b[31m"
    )


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        (SourceError, 1, "this failed"),
        (UsageError, 2, "this failed"),
        (ValueError, 1, "ValueError: this failed"),
    ],
)
def test_each_note_of_an_error_is_a_line(
    invoke: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    code: int,
    says: str,
) -> None:
    def fail(*_: object, **__: object) -> Any:
        error = kind("this failed")
        error.add_note("while cleaning up one:\nnot now")
        error.add_note("two \x1b[31m")
        raise error

    monkeypatch.setattr("streamer.cli.plan.opened", fail)
    ended = invoke("plan", "x")
    assert (ended.code, ended.stdout) == (code, "")
    assert ended.stderr.splitlines() == [
        f"streamer: error: {says}",
        "streamer: while cleaning up one: not now",
        "streamer: two \\x1b[31m",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--debug", "plan", "faulty://x"),
        ("plan", "--debug", "faulty://x"),
        ("plan", "faulty://x", "--debug"),
    ],
)
def test_debug_shows_the_traceback_and_the_notes(
    invoke: Callable[..., Any], registry: Registry, arguments: tuple[str, ...]
) -> None:
    """Before the command or behind it."""
    registry.add(Faulty())
    ended = invoke(*arguments)
    assert ended.code == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert "\na note\n" in ended.stderr
    assert ended.stderr.endswith("faulty://: ValueError: two lines \\x1b[31m\n")


def test_debug_behind_two_dashes_is_an_argument(invoke: Callable[..., Any]) -> None:
    assert "no such file or folder: --debug" in invoke("plan", "--", "--debug").error
