"""How a command ends: one line on stderr for an error, one for each note, and the exit code.

0 done, 1 an error, 2 wrong usage, 129 SIGHUP, 130 Ctrl-C, 141 nobody reads our output any more,
143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from streamer.cli._output import one_line
from streamer.exceptions import StreamerError, UsageError
from streamer.interrupts import Terminated


class Group(TyperGroup):
    """The group of all commands. Its `main` is the one place where errors end."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run ``args`` (by default those of the process) and exit."""
        args = _debug_first(sys.argv[1:] if args is None else args)
        context = None
        code = 0
        try:
            with self.make_context("streamer", args) as context:
                self.invoke(context)
                # What cannot be written must fail here, not while the interpreter shuts down.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except typer.Exit as end:
            code = end.exit_code
        except Terminated as error:
            _say("; ".join(["terminated", *_notes(error)]))
            code = 128 + error.number
        except (KeyboardInterrupt, typer.Abort) as error:
            _say("; ".join(["interrupted", *_notes(error)]))
            code = 128 + signal.SIGINT
        except Exception as error:
            code = _report(error, debug=context is not None and bool(context.params["debug"]))
        sys.exit(code)


def _notes(error: BaseException) -> list[str]:
    """What the servers hold, and what went wrong while they were released."""
    return [one_line(note) for note in getattr(error, "__notes__", ())]


def _debug_first(args: Sequence[str]) -> list[str]:
    """``--debug`` belongs before the command, and is added behind it when something fails."""
    end = args.index("--") if "--" in args else len(args)
    rest = [arg for arg in args[:end] if arg != "--debug"]
    return ["--debug"] * (len(rest) < end) + rest + list(args[end:])


def _report(error: Exception, debug: bool) -> int:
    """Print ``error``; return the exit code for it."""
    _let_go_of_stdout()
    if isinstance(error, BrokenPipeError):  # stdout's: those of sockets are StreamerErrors by now
        return 128 + signal.SIGPIPE
    if debug:
        traceback.print_exception(error)
    # Typer's own errors are click's, whose classes it has moved between releases.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "streamer"
        _say(f"error: {_plainly(format_message())} (see {command} --help)")
        return int(getattr(error, "exit_code", 2))
    ours = isinstance(error, StreamerError)
    _say(f"error: {error}" if ours else f"error: {type(error).__name__}: {error}")
    for note in _notes(error):
        _say(note)
    return 2 if isinstance(error, UsageError) else 1


_MEANT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def _plainly(text: str) -> str:
    """What the library of the options says, without its own jargon, and with what was meant."""
    text = text.rstrip(".").replace("Value error, ", "", 1)
    for short, name in _MEANT.items():
        if f"'{short}' is not one of" in text and f"'{name}'" in text:
            return f"{text}: give {name}"
    return text


def _let_go_of_stdout() -> None:
    """If stdout takes nothing any more lead it away, or the interpreter fails on it at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    if sys.stderr is not None:  # print() would take stdout for it
        with contextlib.suppress(OSError):  # a terminal that has hung up
            print(f"streamer: {one_line(text)}", file=sys.stderr)


class _LogHandler(logging.Handler):
    """Warnings of the library, each a line on what is stderr at that moment (or above the bar)."""

    def __init__(self, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        _say(f"{record.levelname.lower()}: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._debug:
            traceback.print_exception(error)
        elif error is not None:
            _say(f"{type(error).__name__}: {error}")


def log_to_stderr(debug: bool) -> None:
    """Show what the library logs, warnings and worse."""
    log = logging.getLogger("streamer")
    log.handlers = [_LogHandler(debug)]
