"""Arguments and options, so that one that several commands have is the same in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamer.defaults import (
    DEFAULT_BUFFER_SIZE,
    DEFAULT_NUM_BUFFERS,
    MIB,
    Backend,
    CastDtype,
    PauseMode,
)
from streamer.timeouts import Timeouts

BUFFER_SIZE = f"{DEFAULT_BUFFER_SIZE // MIB}MiB"
NUM_BUFFERS = DEFAULT_NUM_BUFFERS
TIMEOUTS = Timeouts()

_CHANGES = "Changing what is sent, in this order"
_SERVER = "Reaching the servers"
_TUNING = "Tuning"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A safetensors file, a checkpoint folder, or scheme://... (see: streamer sources)",
    ),
]
SourceOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the source. Repeat for more."),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Keep nothing on disk of what is downloaded, as with --option no_cache=true.",
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="GLOB",
        rich_help_panel=_CHANGES,
        help="Send only tensors whose name matches, as in 'model.layers.0.*'. Repeat for more.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        rich_help_panel=_CHANGES,
        help="Do not send tensors whose name matches. Repeat for more.",
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        rich_help_panel=_CHANGES,
        help=r"Replace a regular expression in names, as in '^model\.=language_model.'. Repeat for "
        "more; they are applied in order.",
    ),
]
Cast = Annotated[
    CastDtype | None,
    typer.Option(
        "--cast",
        metavar="DTYPE",
        rich_help_panel=_CHANGES,
        help="Send floats as bfloat16, float16, float32 or float64; not fp8, and not scales.",
    ),
]
To = Annotated[
    list[str],
    typer.Option(
        "--to",
        metavar="URL",
        show_default=False,
        help="A server, as http://host:port. Repeat for more: all receive at once.",
    ),
]
WeightVersion = Annotated[
    str | None,
    typer.Option(
        "--weight-version",
        metavar="NAME",
        help="Name of these weights on the servers. By default one is made up.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Push even if every server says that it has this version already."
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Prove that what was sent has arrived: exit code 1 if it has not.",
    ),
]
Pause = Annotated[
    PauseMode,
    typer.Option(
        "--pause",
        help="Requests under way: keep them and go on afterwards, wait for them, abort them, or "
        "none, if you pause and resume the servers yourself.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="STREAMER_API_KEY",
        rich_help_panel=_SERVER,
        help="Sent as 'Authorization: Bearer KEY'. Better in the variable, which ps cannot see.",
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="'NAME: VALUE'",
        rich_help_panel=_SERVER,
        help="HTTP header for every call. Repeat for more.",
    ),
]
CaBundle = Annotated[
    Path | None,
    typer.Option(
        "--ca-bundle",
        metavar="FILE",
        exists=True,
        rich_help_panel=_SERVER,
        help="Certificates (PEM) to trust for https, in place of the usual ones.",
    ),
]
TrustEnvProxies = Annotated[
    bool,
    typer.Option(
        "--trust-env-proxies",
        rich_help_panel=_SERVER,
        help="Obey HTTP_PROXY and its like, which are ignored otherwise.",
    ),
]
ConnectTimeout = Annotated[
    float,
    typer.Option(
        "--connect-timeout",
        metavar="SECONDS",
        rich_help_panel=_SERVER,
        help="Wait this long for a connection, and for all workers to join.",
    ),
]
ProgressTimeout = Annotated[
    float,
    typer.Option(
        "--progress-timeout",
        metavar="SECONDS",
        rich_help_panel=_SERVER,
        help="Give up after this long without an answer, a chunk or a read.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        rich_help_panel=_SERVER,
        help="Give up when the whole push takes longer. By default there is no limit.",
    ),
]
PerTensor = Annotated[
    bool,
    typer.Option(
        "--per-tensor",
        rich_help_panel=_TUNING,
        help="One broadcast per tensor instead of packed chunks. Slower.",
    ),
]
BufferSize = Annotated[
    str,
    typer.Option(
        "--buffer-size",
        metavar="SIZE",
        rich_help_panel=_TUNING,
        help="Size of a chunk: 64MiB, 1GiB, or a number of bytes.",
    ),
]
NumBuffers = Annotated[
    int,
    typer.Option(
        "--num-buffers",
        min=1,
        metavar="N",
        rich_help_panel=_TUNING,
        help="Chunks in flight; each takes the memory of the largest one.",
    ),
]
EngineBackend = Annotated[
    Backend,
    typer.Option(
        "--backend",
        rich_help_panel=_TUNING,
        help="Engine that receives: auto asks the server; nccl is vLLM's own; streamer is ours.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        rich_help_panel=_TUNING,
        help="GPU that sends, such as cuda:1. By default the first one.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST",
        rich_help_panel=_TUNING,
        help="Address of this host as the workers reach it. By default it is found out.",
    ),
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        metavar="PORT",
        rich_help_panel=_TUNING,
        help="Port on this host that workers of our own engine join. 0: a free one.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        dir_okay=False,
        help="Write a timeline of the push there, for https://ui.perfetto.dev.",
    ),
]
