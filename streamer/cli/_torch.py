"""Import torch when a command is known to be right: `streamer --help` does not wait for it."""

from __future__ import annotations

import signal

from streamer.interrupts import ENDS


def import_torch() -> None:
    """Import torch, which takes seconds, with signals held back until it is there.

    An import that Ctrl-C breaks off leaves modules half initialized, and may swallow the signal.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        import torch  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
