"""What of the binding of NCCL can be seen without a GPU. The rest is in tests/gpu."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from streamer.transport._libnccl import UNIQUE_ID_BYTES, dismiss_root

MAGIC = os.urandom(8)


def unique_id(family: int, host: str, port: int) -> bytes:
    """As NCCL makes it: the magic number, then a ``sockaddr``."""
    packed = socket.inet_pton(family, host)
    flow = b"" if family == socket.AF_INET else bytes(4)
    data = MAGIC + struct.pack("=H", family) + struct.pack("!H", port) + flow + packed
    return data.ljust(UNIQUE_ID_BYTES, b"\0")


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_the_root_is_told_that_no_rank_comes(family: int, host: str) -> None:
    with socket.create_server((host, 0), family=family) as root:
        root.settimeout(5)
        dismiss_root(unique_id(family, host, root.getsockname()[1]))
        caller, _ = root.accept()
        with caller:
            caller.settimeout(5)
            said = b"".join(iter(lambda: caller.recv(64), b""))
    # Right magic number, and a type of socket that is none: that ends it (socketFinalizeAccept).
    assert said == MAGIC + b"\xff\xff\xff\xff"


def test_a_root_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as root:
        port = root.getsockname()[1]
    dismiss_root(unique_id(socket.AF_INET, "127.0.0.1", port))


def test_an_id_of_another_making() -> None:
    dismiss_root(bytes(UNIQUE_ID_BYTES))
