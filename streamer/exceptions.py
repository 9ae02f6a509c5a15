"""Every error that streamer raises.

    StreamerError
    ├── UsageError              an argument or option that cannot be right
    ├── PluginError             a source plugin that is broken, missing or ambiguous
    ├── SourceError             the weights cannot be read
    │   └── SpecMismatch        a source yields other than its specs() declared
    ├── PlanError               these tensors cannot be sent to this server
    ├── ServerError             an inference server did not do what was asked
    │   ├── ServerUnreachable   no connection, or it broke before an answer
    │   ├── ServerRefused       an answer, and it says no
    │   └── IncompatibleServer  a version, mode or configuration that cannot work
    ├── RankError               another rank of a trainer failed, or did not come
    ├── TransportError          the data plane failed: rendezvous, broadcast, a dead peer
    ├── VerificationError       what arrived is not what was sent
    ├── PushCancelled           a push that was ended from outside
    └── DeadlineExceeded        a wait ended at its deadline

A message is one line that names the thing (server, phase, tensor, file, both values) and the
remedy, whatever a server or a file puts into it. Errors of libraries are turned into these where
they are caught, with ``from``.
"""

from __future__ import annotations

import contextlib
import traceback

from streamer.held import Held


class StreamerError(Exception):
    """Base of the tree. ``str(error)`` is one line, fit for a user.

    ``held`` is filled by a failed sync: what each server may hold afterwards, by URL, and what to
    do about it.
    """

    held: dict[str, Held]

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))
        self.held = {}

    def __str__(self) -> str:
        parts = [super().__str__(), *(f"{url} {state}" for url, state in self.held.items())]
        return "; ".join(parts)


class UsageError(StreamerError):
    """An argument or option that cannot be right."""


class PluginError(StreamerError):
    """A source plugin that is broken, missing or ambiguous."""


class SourceError(StreamerError):
    """The weights cannot be read."""


class SpecMismatch(SourceError):
    """A source yields a name, dtype or shape that its ``specs()`` did not declare there."""


class PlanError(StreamerError):
    """These tensors cannot be sent to this server."""


class ServerError(StreamerError):
    """An inference server did not do what was asked."""


class ServerUnreachable(ServerError):
    """No connection to a server, or it broke before the answer came."""


class ServerRefused(ServerError):
    """A server answered, and the answer is no. ``status`` is the HTTP status, ``path`` the route
    that was called, without its query; empty for an engine that is an object."""

    def __init__(self, message: str, status: int, path: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.status, self.path), self.__dict__


class IncompatibleServer(ServerError):
    """A server whose version, mode or configuration cannot work with this client."""


class RankError(StreamerError):
    """Another rank of the trainer failed, or did not come. ``rank`` is its number in the group,
    None if it is not known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TransportError(StreamerError):
    """The data plane failed: rendezvous, broadcast, or a peer that died."""


class VerificationError(StreamerError):
    """What arrived at a worker is not what was sent, or nobody can say that it is."""


class PushCancelled(StreamerError):
    """A push that `Session.cancel` has ended."""


class DeadlineExceeded(StreamerError):
    """A wait ended at its deadline."""


def one_line(error: BaseException) -> str:
    """The text of an error of any library, as part of a message."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(it cannot be shown)"


def plain(text: str) -> str:
    """``text`` on one line; what is not printable, and could command a terminal, is escaped."""
    line = " ".join(text.splitlines())
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def forget_locals(error: BaseException) -> None:
    """Clear the variables of our frames that ``error``, its causes and contexts came through.

    Whoever keeps the error would keep staging memory with it, and borrowed tensors; so would the
    cycle of an error and a frame that names it, until the next garbage collection. Frames of others
    stay as they are, for a debugger; so do those that still run.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        current = errors.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        errors += [current.__cause__, current.__context__]
        for frame, _ in traceback.walk_tb(current.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("streamer."):
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()
