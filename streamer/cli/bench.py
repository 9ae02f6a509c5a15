"""``streamer bench``: what this machine can do, and what a push makes of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamer.cli import _options as o
from streamer.cli._files import check_writable
from streamer.cli._headers import make_headers
from streamer.cli._output import one_line, print_facts, print_json, print_table
from streamer.cli._progress import spinner
from streamer.cli._reference import reference_server
from streamer.cli._source import opened
from streamer.cli._torch import import_torch
from streamer.cli.serve import require_server
from streamer.exceptions import SourceError, StreamerError, UsageError
from streamer.sizes import count, format_size, parse_size

if TYPE_CHECKING:
    from streamer.bench.result import Result

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[SOURCE]",
        show_default=False,
        help="What to read and push. By default a checkpoint of random bytes, gone at the end.",
    ),
]
To = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="Push SOURCE to this server, which will serve it, instead of to one that is started "
        "here and throws it away. Repeat for more.",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Size of the checkpoint of random bytes. By default 256MiB, with two GPUs 4GiB.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=1,
        metavar="N",
        help="Repeats per row (the median is shown); fewer for slow rows.",
    ),
]
Chart = Annotated[
    Path | None,
    typer.Option("--chart", metavar="FILE", help="Draw a chart, as SVG."),
]
Deadline = Annotated[
    float,
    typer.Option(
        "--deadline", min=1, metavar="SECONDS", help="Abandon a stage after this long and go on."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="GPU that sends, such as cuda:1. By default the last one; the server takes the first.",
    ),
]
_COLUMNS = ("stage", "setting", ">GB/s", ">seconds", "")


def bench(
    source: Source = None,
    option: o.SourceOptions = None,
    to: To = None,
    size: Size = None,
    repeats: Repeats = 3,
    json: o.Json = False,
    chart: Chart = None,
    trace: o.TraceFile = None,
    deadline: Deadline = 120.0,
    api_key: o.ApiKey = None,
    header: o.Header = None,
    ca_bundle: o.CaBundle = None,
    trust_env_proxies: o.TrustEnvProxies = False,
    device: Device = None,
) -> None:
    """Measure what this machine can do: read, host to device, broadcast, end to end.

    Example: streamer bench /models/Qwen3-8B --chart bench.svg --trace bench.json

    Every stage is measured alone, so the slowest is a bound that no push can beat;
    the last rows are real pushes. Ends with exit code 1 if a stage has failed.
    """
    _check(source, option, to, size)
    if chart is not None and chart.suffix.lower() not in ("", ".svg"):
        raise UsageError(f"--chart: {one_line(chart)}: a chart is SVG: let its name end in .svg")
    for file, name in ((chart, "--chart"), (trace, "--trace")):
        if file is not None:
            check_writable(file, name)
    nbytes = None if size is None else parse_size(size, "--size")
    headers = make_headers(header, api_key)
    if not to:
        require_server()
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(spinner("starting ..."))
        import_torch()
        from streamer.bench import run

        devices = run.Devices.find(device)
        kind = "cuda" if devices.receiver is not None else "cpu"
        made = source is None
        if source is None:
            say("writing a checkpoint ...")
            nbytes = nbytes or (run.CUDA_SIZE if kind == "cuda" else run.CPU_SIZE)
            source = str(stack.enter_context(run.made_up(nbytes)))
        weights = stack.enter_context(opened(source, option))
        specs = weights.specs()
        if not specs:
            raise SourceError("the source has no tensors: nothing to measure")
        if to:
            urls, server = to, _no_server
        else:
            serving = reference_server("--workers", "1", "--device", kind, "--discard")
            urls, server = [], stack.enter_context(serving).url
        work = run.Bench(
            weights,
            repeats=repeats,
            seconds=deadline,
            devices=devices,
            urls=urls,
            server=server,
            options={
                "headers": headers,
                "ca_bundle": None if ca_bundle is None else str(ca_bundle),
                "trust_env": trust_env_proxies,
            },
            cached=made,
            trace=trace,
            say=say,
        )
        work.result.source = {
            "name": "random bytes" if made else source,
            "tensors": len(specs),
            "bytes": sum(spec.nbytes for spec in specs),
            "synthetic": made,
        }
        result = work.run()
    if chart is not None:
        from streamer.bench.chart import write_chart

        write_chart(result, [one_line(fact) for fact in _measured_on(result)], chart)
    _show(result, json)
    if result.failed:
        stage, why = next(iter(result.failed.items()))
        raise StreamerError(f"{count(len(result.failed), 'stage')} failed; {stage}: {why}")


def _check(
    source: str | None, option: list[str] | None, to: list[str] | None, size: str | None
) -> None:
    if source is None and to:
        raise UsageError(
            "--to needs a SOURCE: random bytes would replace the weights that the server serves"
        )
    if source is None and option:
        raise UsageError("--option is for a SOURCE, and none is given")
    if source is not None and size is not None:
        raise UsageError("--size is for a checkpoint of random bytes, and a SOURCE is given")


def _no_server() -> str:
    raise AssertionError("the user has given servers")


def _show(result: Result, json: bool) -> None:
    if json:
        print_json(result.as_json())
        return
    from streamer.bench.chart import rate

    print_table(
        _COLUMNS,
        (
            (row.stage, row.setting, rate(row), f"{row.median:.4f}", row.detail)
            for row in result.rows
        ),
    )
    facts = dict(zip(("machine", "versions", "source"), _measured_on(result), strict=True))
    facts |= {f"without {stage}": why for stage, why in result.left_out.items()}
    facts |= {f"failed: {stage}": why for stage, why in result.failed.items()}
    if result.bound is not None:
        bound = result.bound
        facts["bound"] = f"{bound.stage}, {rate(bound)} GB/s at its best ({bound.setting})"
    if result.push is not None and result.of_bound is not None:
        best = result.push
        facts["end to end"] = (
            f"{rate(best)} GB/s at its best ({best.setting}): {result.of_bound:.0%} of the bound"
        )
    print_facts(facts)


def _measured_on(result: Result) -> tuple[str, str, str]:
    """The machine, the versions, and the source."""
    machine, versions, source = result.machine, result.versions, result.source
    gpus = machine["gpus"]
    commit = f" ({versions['commit']})" if versions["commit"] else ""
    named = {name: versions[name] for name in ("python", "torch", "cuda", "nccl")}
    tensors, nbytes = count(source["tensors"], "tensor"), format_size(source["bytes"])
    return (
        f"{f'{len(gpus)} x {gpus[0]}' if gpus else 'no GPU'}, {count(machine['cores'], 'core')} of "
        f"{machine['cpu']}, load {machine['load']:g}",
        f"streamer {versions['streamer']}{commit}, "
        + ", ".join(f"{name} {number}" for name, number in named.items() if number),
        f"{source['name']}, {tensors}, {nbytes}",
    )
