"""The application: all commands, and what is told of ``streamer`` itself."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated

import typer

import streamer.cli
from streamer.cli._errors import Group, log_to_stderr


def make_app() -> typer.Typer:
    """The application with all of its commands."""
    app = typer.Typer(
        cls=Group,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_streamer)
    for module in pkgutil.iter_modules(streamer.cli.__path__):
        if not module.name.startswith("_"):
            command = getattr(importlib.import_module(f"streamer.cli.{module.name}"), module.name)
            app.command(module.name, help=_unwrapped(command.__doc__))(command)
    return app


def _unwrapped(text: str) -> str:
    """``text`` with each paragraph on one line: a terminal has a width of its own."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"streamer {version('streamer')}")
        raise typer.Exit


def _streamer(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version of streamer and exit.",
        ),
    ] = False,
) -> None:
    """Stream model weights from anywhere into running inference servers.

    To see it work, here and now: streamer demo

    Example: streamer push /models/Qwen3-8B --to http://localhost:8000

    What a command can do: streamer push --help
    """
    log_to_stderr(debug)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
