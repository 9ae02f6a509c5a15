"""``streamer push``: send a source to servers, once."""

from __future__ import annotations

import dataclasses
import time

from streamer.cli import _options as o
from streamer.cli._ahead import begin_ahead
from streamer.cli._files import tracing
from streamer.cli._headers import make_headers
from streamer.cli._output import one_line, print_json
from streamer.cli._progress import push_progress
from streamer.cli._sizes import count, format_size, parse_size
from streamer.cli._source import opened
from streamer.cli._torch import import_torch
from streamer.defaults import Backend, PauseMode
from streamer.report import Report
from streamer.timeouts import Timeouts


def push(
    source: o.Source,
    to: o.To,
    option: o.SourceOptions = None,
    no_cache: o.NoCache = False,
    select: o.Select = None,
    exclude: o.Exclude = None,
    rename: o.Rename = None,
    cast: o.Cast = None,
    weight_version: o.WeightVersion = None,
    force: o.Force = False,
    verify: o.Verify = False,
    pause: o.Pause = PauseMode.keep,
    json: o.Json = False,
    trace: o.TraceFile = None,
    api_key: o.ApiKey = None,
    header: o.Header = None,
    ca_bundle: o.CaBundle = None,
    trust_env_proxies: o.TrustEnvProxies = False,
    connect_timeout: o.ConnectTimeout = o.TIMEOUTS.connect,
    progress_timeout: o.ProgressTimeout = o.TIMEOUTS.progress,
    timeout: o.Timeout = o.TIMEOUTS.total,
    per_tensor: o.PerTensor = False,
    buffer_size: o.BufferSize = o.BUFFER_SIZE,
    num_buffers: o.NumBuffers = o.NUM_BUFFERS,
    backend: o.EngineBackend = Backend.auto,
    device: o.Device = None,
    address: o.Address = None,
    port: o.Port = 0,
) -> None:
    """Push the weights of SOURCE into running servers.

    Example: streamer push /models/Qwen3-8B --to http://localhost:8000

    A vLLM server must run with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config.

    When this ends with exit code 0, all servers answer with the new weights.
    """
    size = parse_size(buffer_size, "--buffer-size")
    headers = make_headers(header, api_key)
    ca = None if ca_bundle is None else str(ca_bundle)
    begin_ahead(
        to,
        device,
        connect_timeout=connect_timeout,
        headers=headers,
        ca_bundle=ca,
        trust_env=trust_env_proxies,
    )
    import_torch()
    from streamer.session import Session

    # What was pushed is told before the timeline is written, which may fail.
    with tracing(trace) as timeline:
        with (
            push_progress() as on_event,
            Session(
                to,
                backend=backend.value,
                packed=not per_tensor,
                buffer_size=size,
                num_buffers=num_buffers,
                pause=pause.value,
                timeouts=Timeouts(connect_timeout, progress_timeout, timeout),
                device=device,
                address=address,
                port=port,
                headers=headers,
                ca_bundle=ca,
                trust_env=trust_env_proxies,
                verify=verify,
                trace=timeline,
                on_event=on_event,
            ) as session,
        ):
            started = time.monotonic()
            with opened(
                source,
                option,
                no_cache=no_cache,
                select=select,
                exclude=exclude,
                rename=rename,
                cast=cast,
            ) as weights:
                opening = time.monotonic() - started
                report = session.push(weights, weight_version=weight_version, force=force)
        report = _with_opening(report, opening)
        if json:
            print_json(report.as_json())
        else:
            print(_summary(report))


def _with_opening(report: Report, seconds: float) -> Report:
    """Count the opening of the source, which was done here because only here are its options."""
    old = report.seconds
    new = dataclasses.replace(old, open=old.open + seconds, total=old.total + seconds)
    return dataclasses.replace(report, seconds=new)


def _summary(report: Report) -> str:
    workers = count(sum(server.world_size for server in report.servers), "worker")
    servers = count(len(report.servers), "server")
    seconds = report.seconds
    if not report.tensors:
        return (
            f"nothing to send: {servers} had weight version {one_line(report.weight_version)} "
            "already (--force pushes it again)"
        )
    return (
        f"pushed {count(report.tensors, 'tensor')}, {format_size(report.bytes)}, to {workers} of "
        f"{servers} in {seconds.total:.2f} s (open {seconds.open:.2f}, connect "
        f"{seconds.connect:.2f}, update {seconds.update:.2f} at {report.gb_per_s:.2f} GB/s, finish "
        f"{seconds.finish:.2f}); weight version {one_line(report.weight_version)}{_proof(report)}"
    )


def _proof(report: Report) -> str:
    """How the arrival was proven, if that was asked, and what it has cost."""
    proofs = {server.url: server.verified for server in report.servers if server.verified}
    if not proofs:
        return ""
    if len(set(proofs.values())) == 1:
        said = next(iter(proofs.values()))
    else:
        said = ", ".join(f"{url} {proof}" for url, proof in proofs.items())
    return f"; arrival: {said} ({report.seconds.verify:.2f} s)"
