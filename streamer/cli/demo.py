"""``streamer demo``: make weights, push them, and compare what arrived."""

from __future__ import annotations

import tempfile
from pathlib import Path

from streamer.cli._checkpoint import read_checksums, write_checkpoint
from streamer.cli._output import draw_table
from streamer.cli._progress import spinner
from streamer.cli._reference import reference_server
from streamer.cli._torch import import_torch
from streamer.cli.serve import require_server
from streamer.exceptions import StreamerError
from streamer.sizes import format_size

_WORKERS = 2
_BUFFER_SIZE = 16 << 20
_COLUMNS = ("mode", ">tensors", ">bytes", ">chunks", ">seconds", ">GB/s", ">checksums equal")


def demo() -> None:
    """Push made-up weights to a server on this machine and check every byte.

    Example: streamer demo

    Starts a reference server with two worker processes, pushes one checkpoint
    packed and another tensor by tensor, and after each compares every tensor
    in every worker with the file. Needs no GPU and no model, some seconds, and
    160 MB of temporary disk space.
    """
    import_torch()
    import streamer

    require_server()
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="streamer-demo-") as temporary,
        spinner("starting a server with two workers, writing two checkpoints ...") as say,
        reference_server("--workers", str(_WORKERS), "--device", "cpu") as server,
    ):
        # Other weights for the second push: one that moved nothing would show.
        folders = {"packed": Path(temporary, "first"), "per tensor": Path(temporary, "second")}
        for seed, folder in enumerate(folders.values()):
            folder.mkdir()
            write_checkpoint(folder, seed)
        url = server.url()
        for mode, folder in folders.items():
            say(f"pushing, {mode} ...")
            report = streamer.push(
                folder, to=url, packed=mode == "packed", buffer_size=_BUFFER_SIZE
            )
            say("comparing checksums ...")
            expected = {
                f"{worker}:{name}": checksum
                for name, checksum in read_checksums(folder).items()
                for worker in range(_WORKERS)
            }
            held = _held(url)
            names = sorted(expected.keys() | held.keys())
            differ = [name for name in names if expected.get(name) != held.get(name)]
            wrong += [f"{name} ({mode})" for name in differ]
            rows.append(
                (
                    mode,
                    str(report.tensors),
                    format_size(report.bytes),
                    str(report.chunks),
                    f"{report.seconds.update:.2f}",
                    f"{report.gb_per_s:.2f}",
                    f"{len(names) - len(differ)} of {len(names)}",
                )
            )
    draw_table(_COLUMNS, rows)
    if wrong:
        raise StreamerError(f"{len(wrong)} tensors are not those of the file: {wrong[0]} is one")
    print("Every tensor arrived in both workers, byte for byte.")
    print("Next: streamer push YOUR_CHECKPOINT --to http://your-server:8000")


def _held(url: str) -> dict[str, str]:
    """The checksum of every tensor that the server holds, by ``worker:name``."""
    from streamer.drivers.http import HttpClient

    client = HttpClient(url, connect_timeout=10)
    answer = client.post("/weight_checker", {"action": "checksum"}, 60)
    checksums: dict[str, str] = answer["checksums"]
    return checksums
