"""The command line.

Every module here whose name does not start with an underscore is a command of that name: a function
of the module's name, which imports what is heavy when it runs. A new command is a new file.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from streamer.interrupts import ENDS, Terminated, terminate

if TYPE_CHECKING:
    from streamer.cli._app import _streamer as _streamer
    from streamer.cli._app import make_app

__all__ = ["main", "make_app"]


def main() -> None:
    """Entry point of the script ``streamer``: runs ``sys.argv`` and exits."""
    try:
        # As after Ctrl-C, a session that is told to end tidies up: servers are not left
        # half-updated.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, terminate)
        # Names of tensors and files are anybody's: one that the terminal cannot show is no error.
        if sys.stdout is not None:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        # Not above: this takes longer than the start of Python, and a signal may come meanwhile.
        from streamer.cli._app import make_app

        make_app()()
    except Terminated as error:
        _say("terminated")
        sys.exit(128 + error.number)
    except KeyboardInterrupt:  # before the application could take it, or a second one
        _say("interrupted")
        sys.exit(128 + signal.SIGINT)
    finally:
        for number in ENDS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            # Python waits for threads, of which one may be stuck.
            signal.signal(number, _exit_at_once)
            # After them Python runs no handler any more, and has a second to go with torch.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # a terminal that has hung up
            print(f"streamer: {text}", file=sys.stderr)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if not TYPE_CHECKING:
    # As in `main`: typer is not imported before that runs.
    def __getattr__(name):
        if name not in ("_streamer", "make_app"):
            raise AttributeError(f"module 'streamer.cli' has no attribute {name!r}")
        return getattr(importlib.import_module("streamer.cli._app"), name)
