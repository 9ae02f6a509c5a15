"""The options of a session: what may be given, the defaults, and the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from streamer.defaults import (
    DEFAULT_BUFFER_SIZE,
    DEFAULT_NUM_BUFFERS,
    DEFAULT_THREADS,
    Backend,
    PauseMode,
)
from streamer.events import Event
from streamer.exceptions import UsageError
from streamer.timeouts import Timeouts
from streamer.trace import Trace


class ConnectOptions(TypedDict, total=False):
    """Options of `connect` and `push`."""

    backend: str
    """``auto`` asks the server; ``nccl`` is vLLM's own engine, ``streamer`` ours."""
    packed: bool
    """Packed chunks (True, the default) or one broadcast a tensor."""
    buffer_size: int
    """Bytes of a packed chunk, which closes once it is larger; 256 MiB."""
    num_buffers: int
    """Chunks in flight; 2."""
    threads: int
    """Threads that read deferred tensors; 12."""
    pause: str
    """``keep`` (default), ``wait``, ``abort``, or ``none`` if the caller pauses and resumes."""
    timeouts: Timeouts
    """Deadlines for connecting, for progress, and for a whole push."""
    device: str | torch.device | None
    """The CUDA device that sends; the current one by default."""
    address: str | None
    """This host's address as the workers reach it; found by connecting to the servers."""
    port: int
    """Port here that workers of our own engine join at; 0 (default) takes a free one."""
    headers: Mapping[str, str]
    """HTTP headers for every call, ``Authorization`` for one. Never logged."""
    ca_bundle: str | None
    """Path of the certificates (PEM) to trust for https, in place of the usual ones."""
    trust_env: bool
    """Whether proxies of the environment apply to the servers; False."""
    verify: bool
    """Prove after each push that what was sent has arrived; False. See docs/verify.md."""
    trace: Trace
    """Records a timeline while ``trace.enabled``."""
    on_event: Callable[[Event], None] | None
    """Called with each event of a sync, on the thread that pushes; by `apush` on the loop's."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """`ConnectOptions` with their defaults, checked."""

    backend: str = "auto"
    packed: bool = True
    buffer_size: int = DEFAULT_BUFFER_SIZE
    num_buffers: int = DEFAULT_NUM_BUFFERS
    threads: int = DEFAULT_THREADS
    pause: str = "keep"
    timeouts: Timeouts = field(default_factory=Timeouts)
    device: torch.device | None = None
    address: str | None = None
    port: int = 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_bundle: str | None = None
    trust_env: bool = False
    verify: bool = False
    trace: Trace = field(default_factory=lambda: Trace(enabled=False))
    on_event: Callable[[Event], None] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """From what a caller gave. Raises `UsageError` for what cannot be right."""
        unknown = set(options) - set(cls.__dataclass_fields__)
        if unknown:
            raise UsageError(f"there is no option {', '.join(sorted(unknown))}")
        return cls(**{**options, "device": _device(options.get("device"))})

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, list(Backend))
        _one_of("pause", self.pause, list(PauseMode))
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise UsageError(f"{name} must be of type {kind.__name__}, not {value!r:.100}")
        for name in ("buffer_size", "num_buffers", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.on_event is not None and not callable(self.on_event):
            raise UsageError(f"on_event must be callable, not {self.on_event!r:.100}")
        if not all(isinstance(text, str) for pair in self.headers.items() for text in pair):
            raise UsageError("headers must be texts by name")
        if self.port not in range(1 << 16):
            raise UsageError(f"port must be a number from 0 to 65535, not {self.port}")


_KINDS: Mapping[str, type] = {
    "packed": bool,
    "verify": bool,
    "trust_env": bool,
    "buffer_size": int,
    "num_buffers": int,
    "threads": int,
    "timeouts": Timeouts,
    "headers": Mapping,
    "trace": Trace,
}


def _one_of(name: str, value: str, values: Sequence[str]) -> None:
    if value not in values:
        raise UsageError(f"{name} must be one of {', '.join(values)}, not {value!r}")


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        if parsed.type == "cuda" and parsed.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, TypeError, AssertionError) as error:  # the last one without CUDA
        raise UsageError(f"device {device!r}: {str(error).partition(chr(10))[0]}") from None
    if parsed.type != "cuda":
        raise UsageError(f"device must be a CUDA device, which sends over NCCL, not {device!r}")
    return parsed
