"""Open files: every connection takes one, and a process may have only so many at a time.

Where torch and Gloo run out of them they wait, or end the process: their threads cannot raise. So
the limit is checked first.
"""

from __future__ import annotations

import errno
import os
import resource

from streamer.exceptions import TransportError

REMEDY = "raise the limit of open files (ulimit -n)"

STORE = 16
"""What one end of a lifeline opens at most, before what each worker adds to it."""
_GLOO = 4
_PER_WORKER = 5
"""On the trainer: its connections to the store, and to Gloo."""
_PER_SERVER = 2
"""The call that has its workers join, while they do."""


def of_group(workers: int, servers: int) -> int:
    """How many files the trainer's end of a group opens at most."""
    return STORE + _GLOO + workers * _PER_WORKER + servers * _PER_SERVER


def check_room(need: int, what: str) -> None:
    """Raise `TransportError` naming ``what`` if this process cannot open ``need`` files more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if not ran_out(error):  # no Linux
            return
        used = limit  # it takes one itself
    if need > limit - used:
        raise TransportError(
            f"{what} takes up to {need} open files, and this process has {used} and may have "
            f"{limit}: {REMEDY}"
        )


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` says that no more files can be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
