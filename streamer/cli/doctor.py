"""``streamer doctor``: what a push would run into, found without changing anything."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from streamer.cli import _options as o
from streamer.cli._headers import make_headers
from streamer.cli._output import on_terminal, one_line, print_json, print_table
from streamer.cli._sizes import count, parse_size
from streamer.cli._source import opened
from streamer.cli._torch import import_torch
from streamer.defaults import Backend
from streamer.timeouts import Timeouts

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[SOURCE]",
        show_default=False,
        help="What would be pushed: also check that it can be read, and sent to these servers.",
    ),
]
_SECONDS = 10.0


def doctor(
    to: o.To,
    source: Source = None,
    option: o.SourceOptions = None,
    no_cache: o.NoCache = False,
    select: o.Select = None,
    exclude: o.Exclude = None,
    rename: o.Rename = None,
    cast: o.Cast = None,
    verify: o.Verify = False,
    json: o.Json = False,
    api_key: o.ApiKey = None,
    header: o.Header = None,
    ca_bundle: o.CaBundle = None,
    trust_env_proxies: o.TrustEnvProxies = False,
    connect_timeout: o.ConnectTimeout = _SECONDS,
    progress_timeout: o.ProgressTimeout = _SECONDS,
    per_tensor: o.PerTensor = False,
    buffer_size: o.BufferSize = o.BUFFER_SIZE,
    num_buffers: o.NumBuffers = o.NUM_BUFFERS,
    backend: o.EngineBackend = Backend.auto,
    device: o.Device = None,
    address: o.Address = None,
    port: o.Port = 0,
) -> None:
    """Find out whether a push would work, and what to do if not. Changes nothing.

    Example: streamer doctor /models/Qwen3-8B --to http://localhost:8000

    Ends with exit code 1 if a push would fail. In a pipe a finding is a line: ok,
    warn or fail, the check, what was found, and the remedy, with tabs between.
    """
    import_torch()
    from streamer.doctor import examine
    from streamer.options import Options

    options = Options.parse(
        {
            "backend": backend.value,
            "packed": not per_tensor,
            "buffer_size": parse_size(buffer_size, "--buffer-size"),
            "num_buffers": num_buffers,
            "timeouts": Timeouts(connect_timeout, progress_timeout),
            "device": device,
            "address": address,
            "port": port,
            "headers": make_headers(header, api_key),
            "ca_bundle": None if ca_bundle is None else str(ca_bundle),
            "trust_env": trust_env_proxies,
            "verify": verify,
        }
    )
    weights = None
    if source is not None:
        weights = opened(
            source,
            option,
            no_cache=no_cache,
            select=select,
            exclude=exclude,
            rename=rename,
            cast=cast,
        )
    findings = list(examine(to, options, weights))
    failed = sum(found.status == "fail" for found in findings)
    if json:
        print_json({"ok": not failed, "findings": [asdict(found) for found in findings]})
    else:
        several = len(to) > 1
        print_table(
            ("", "check", "found", "remedy"),
            [
                (
                    found.status,
                    f"{found.name} {found.server}" if several and found.server else found.name,
                    found.text,
                    found.remedy,
                )
                for found in findings
            ],
        )
        if on_terminal():
            print(one_line(_verdict(failed)))
    if failed:
        raise typer.Exit(1)


def _verdict(failed: int) -> str:
    return (
        f"{count(failed, 'check')} failed: a push would too." if failed else "A push should work."
    )
