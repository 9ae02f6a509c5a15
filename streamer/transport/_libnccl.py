"""A thin binding of the NCCL that torch has loaded: nine calls, all of them non-blocking.

torch's `ProcessGroupNCCL` cannot be cancelled while it connects (docs/transports.md says what was
tried), so the communicator is driven through NCCL's own interface, with ``blocking = 0``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import struct
from typing import Any

import torch

from streamer.exceptions import TransportError

SUCCESS, IN_PROGRESS = 0, 7
UNIQUE_ID_BYTES = 128
SUM = 0

DTYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""``ncclDataType_t``. Everything else travels as bytes: a broadcast copies them unread."""


_ROOT_SECONDS = 1.0


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """The first fields of ``ncclConfig_t``; ``size`` tells NCCL that the rest keep defaults."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def non_blocking_config() -> Any:
    """A configuration that makes every call of the communicator return at once."""
    return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)


@functools.cache
def library() -> ctypes.CDLL:
    """The NCCL library. Raises `TransportError` where torch has none."""
    if not torch.cuda.is_available():
        raise TransportError(
            "NCCL needs a CUDA device, and torch sees none here: run the trainer on a GPU, or use "
            "a server whose workers are on the CPU"
        )
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransportError(f"torch is built with CUDA, but its libnccl.so.2: {error}") from error
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for name, arguments in {
        "ncclGetVersion": [pointer],
        "ncclGetUniqueId": [pointer],
        "ncclCommInitRankConfig": [pointer, integer, UniqueId, integer, pointer],
        "ncclCommGetAsyncError": [pointer, pointer],
        "ncclCommAbort": [pointer],
        "ncclBroadcast": [pointer, pointer, size, integer, integer, pointer, pointer],
        "ncclAllReduce": [pointer, pointer, size, integer, integer, pointer, pointer],
    }.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = arguments, integer
    for name in ("ncclGetErrorString", "ncclGetLastError"):
        getattr(nccl, name).restype = ctypes.c_char_p
    nccl.ncclGetErrorString.argtypes = [integer]
    nccl.ncclGetLastError.argtypes = [pointer]
    return nccl


def dismiss_root(unique_id: bytes) -> None:
    """End the thread with which ``ncclGetUniqueId`` waits for all ranks, if it still does.

    ``ncclCommAbort`` leaves it and its socket behind. It ends when a caller that knows the magic
    number of the id says that it is no rank (``bootstrap.cc`` and ``socket.cc`` of NCCL 2.18 to
    2.29; the id begins with that number, and the address as a ``sockaddr``). Never raises.
    """
    magic, family = unique_id[:8], struct.unpack_from("=H", unique_id, 8)[0]
    if family not in (socket.AF_INET, socket.AF_INET6):
        return
    (port,) = struct.unpack_from("!H", unique_id, 10)
    host = unique_id[12:16] if family == socket.AF_INET else unique_id[16:32]
    address: tuple[str, int] | tuple[str, int, int, int] = (socket.inet_ntop(family, host), port)
    if family == socket.AF_INET6:
        address = (*address[:2], 0, struct.unpack_from("=I", unique_id, 32)[0])
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(_ROOT_SECONDS)
        caller.connect(address)
        caller.sendall(magic + b"\xff" * 4)


def describe(code: int) -> str:
    """NCCL's own words for a result code, and its last message if it left one."""
    nccl = library()
    text = nccl.ncclGetErrorString(code).decode()
    last = (nccl.ncclGetLastError(None) or b"").decode().strip()
    return f"{text} ({' '.join(last.split())})" if last else text


def version() -> str:
    """The version of the library, as ``2.28.9``."""
    number = ctypes.c_int()
    library().ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
