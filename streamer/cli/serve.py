"""``streamer serve``: the reference server, something to push to without vLLM or a GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from streamer.cli._headers import sendable
from streamer.exceptions import StreamerError, UsageError
from streamer.sizes import count


class WorkerDevice(StrEnum):
    """Where the workers keep what they receive."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def serve(
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="PORT", help="Listen here; 0: on a free port."
        ),
    ] = 8000,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=1, metavar="N", help="Worker processes; with cuda one per GPU."
        ),
    ] = 2,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="HOST", help="Listen on this address; 0.0.0.0: on every one."
        ),
    ] = "127.0.0.1",
    device: Annotated[
        WorkerDevice,
        typer.Option(
            "--device", help="Where the workers keep weights; auto: on GPUs if there are enough."
        ),
    ] = WorkerDevice.auto,
    discard: Annotated[
        bool,
        typer.Option("--discard", help="Throw the weights away as they arrive: to measure speed."),
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="STREAMER_API_KEY",
            help="Refuse every call without it. Better in the variable, which ps cannot see.",
        ),
    ] = None,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof",
            help="End when standard input closes: never outlives the program that started it.",
        ),
    ] = False,
) -> None:
    """Run the reference server: it answers like vLLM and keeps what it is sent.

    Example: streamer serve --port 8000 --workers 2

    Then, in another terminal: streamer push SOURCE --to http://127.0.0.1:8000

    Ctrl-C ends it. Anybody who reaches it may push unless it asks for a key, which crosses the
    network unencrypted: keep it in a trusted one.
    """
    run = require_server()
    if api_key is not None:
        api_key = sendable("the API key", api_key)
        if not api_key:
            raise UsageError("the API key is empty: give one, or no --api-key")
    chosen = _choose(device, workers)

    def on_ready(url: str) -> None:
        print(f"ready: {url}, {count(workers, 'worker')} on {chosen} (Ctrl-C ends it)")
        print(f"push:  streamer push SOURCE --to {url}", flush=True)

    if until_eof:
        threading.Thread(target=_end_at_eof, daemon=True).start()
    run(
        host=host,
        port=port,
        workers=workers,
        device=chosen,
        discard=discard,
        api_key=api_key,
        on_ready=on_ready,
    )


def require_server() -> Callable[..., None]:
    """`streamer.receiver.server.run`. Raises `StreamerError` if its extra is not installed."""
    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from streamer.receiver.server import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("httptools", "starlette", "uvicorn", "uvloop"):
            raise
        raise StreamerError(
            f"the reference server needs {missing}: install streamer with its extra, as '.[serve]'"
        ) from error
    return run


def _choose(device: WorkerDevice, workers: int) -> str:
    """``cpu`` or ``cuda``. Raises `UsageError` for more workers than GPUs."""
    if device is WorkerDevice.cpu:
        return "cpu"
    import torch

    gpus = torch.cuda.device_count()
    if gpus >= workers:
        return "cuda"
    if device is WorkerDevice.auto:
        return "cpu"
    raise UsageError(
        f"{count(workers, 'worker')} need a GPU each and torch sees {gpus}: "
        "give fewer --workers, or --device cpu"
    )


def _end_at_eof() -> None:
    """Ctrl-C for this process once standard input is closed."""
    # Not sys.stdin: its lock, held here, would end the interpreter's exit with a fatal error.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)
