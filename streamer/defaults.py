"""What a push may be told to do, and what it does otherwise, as measured: docs/measurements.md.

Free of torch, so that the help of the command line is there at once.
"""

from __future__ import annotations

from enum import StrEnum

MIB = 1 << 20
DEFAULT_BUFFER_SIZE = 256 * MIB
DEFAULT_CALL_SIZE = 16 << 30
"""A call of ``/update_weights`` ends with the chunk that makes it larger. One that has failed is
sent to its end, with filler."""
DEFAULT_NUM_BUFFERS = 2
DEFAULT_THREADS = 12


class PauseMode(StrEnum):
    """What becomes of requests that a server is answering."""

    keep = "keep"
    wait = "wait"
    abort = "abort"
    none = "none"


class Backend(StrEnum):
    """The engine that receives."""

    auto = "auto"
    nccl = "nccl"
    streamer = "streamer"


ENGINES = (Backend.nccl, Backend.streamer)


class CastDtype(StrEnum):
    """What tensors can be cast to."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"
