"""Slow things that do not need torch, begun before torch is imported, which takes seconds too."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Mapping, Sequence

from streamer.drivers.http import HttpClient
from streamer.drivers.vllm_info import SERVER_INFO, Setup
from streamer.interrupts import ENDS


def begin_ahead(
    servers: Sequence[str],
    device: str | None,
    *,
    connect_timeout: float,
    headers: Mapping[str, str],
    ca_bundle: str | None,
    trust_env: bool,
) -> None:
    """Ask each server what it is, and make the CUDA context of ``device`` if one of them has GPUs.

    vLLM takes two seconds for its first answer to this, and a context takes half a second. Returns
    at once; it only saves time, as all is asked again. Raises `UsageError` for what cannot be a
    server or a header.
    """
    lock = threading.Lock()
    # The threads inherit this: a signal is the main thread's, which holds it back meanwhile.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        for url in servers:
            client = HttpClient(
                url,
                connect_timeout=connect_timeout,
                headers=headers,
                ca_bundle=ca_bundle,
                trust_env=trust_env,
            )
            threading.Thread(target=_ask, args=(client, device, lock), daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _ask(client: HttpClient, device: str | None, lock: threading.Lock) -> None:
    # What goes wrong here goes wrong again where it is reported.
    with contextlib.suppress(Exception):
        setup = Setup.parse(client.get(SERVER_INFO, 60.0))
        if setup.device == "cuda":
            with lock:
                make_context(device)


def make_context(device: str | None) -> None:
    """Make the primary context of a CUDA device, which torch takes over, and keep it."""
    kind, _, index = (device or "cuda").partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return
    with contextlib.suppress(OSError):  # no driver, no device
        cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        if cuda.cuInit(0) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(index or "0"))
