"""The command line.

Every module here whose name does not start with an underscore is a command of that name: a function
of the module's name, which imports what is heavy when it runs. A new command is a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from typing import Annotated

import typer

from streamer.cli._errors import Group, log_to_stderr
from streamer.interrupts import terminate

__all__ = ["main", "make_app"]


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
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            command = getattr(importlib.import_module(f"{__name__}.{module.name}"), module.name)
            app.command(module.name)(command)
    return app


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


def main() -> None:
    """Entry point of the script ``streamer``: runs ``sys.argv`` and exits."""
    # Names of tensors and files are anybody's: one that the terminal cannot show is no error.
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # As after Ctrl-C, a session that is told to end tidies up: servers are not left half-updated.
    signal.signal(signal.SIGTERM, terminate)
    make_app()()
