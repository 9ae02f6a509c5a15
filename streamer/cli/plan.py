"""``streamer plan``: what a push would send, without sending it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamer.cli import _options as o
from streamer.cli._output import print_facts, print_json, print_table
from streamer.cli._sizes import count, format_size, parse_size
from streamer.cli._source import opened
from streamer.cli._torch import import_torch

if TYPE_CHECKING:
    from streamer.plan import Plan
    from streamer.source import TensorSpec


def plan(
    source: o.Source,
    option: o.SourceOptions = None,
    no_cache: o.NoCache = False,
    select: o.Select = None,
    exclude: o.Exclude = None,
    rename: o.Rename = None,
    cast: o.Cast = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor instead of the chunks.")
    ] = False,
    json: o.Json = False,
    per_tensor: o.PerTensor = False,
    buffer_size: o.BufferSize = o.BUFFER_SIZE,
    num_buffers: o.NumBuffers = o.NUM_BUFFERS,
) -> None:
    """Show what a push of SOURCE would send. Sends nothing, needs no server.

    Example: streamer plan /models/Qwen3-8B --buffer-size 1GiB
    """
    import_torch()
    from streamer.plan import make_plan

    size = parse_size(buffer_size, "--buffer-size")
    with opened(
        source, option, no_cache=no_cache, select=select, exclude=exclude, rename=rename, cast=cast
    ) as weights:
        planned = make_plan(weights.specs(), packed=not per_tensor, buffer_size=size)
    if json:
        print_json(_as_json(planned, num_buffers, tensors))
        return
    print_facts(_facts(planned, num_buffers))
    if tensors:
        print_table(
            ("tensor", "dtype", "shape", ">bytes", ">chunk"),
            (
                (spec.name, spec.dtype_name, list(spec.shape), f"{spec.nbytes:,}", index)
                for index, spec in _specs(planned)
            ),
        )
    else:
        print_table(
            ("chunk", ">tensors", ">bytes", "first tensor", "last tensor"),
            (
                (row["index"], row["tensors"], f"{row['bytes']:,}", row["first"], row["last"])
                for row in _chunk_rows(planned)
            ),
        )


def _specs(planned: Plan) -> list[tuple[int, TensorSpec]]:
    """Every tensor in the order of the source, with the number of its chunk, from 0."""
    return [(index, spec) for index, chunk in enumerate(planned.chunks) for spec in chunk.specs]


def _facts(planned: Plan, num_buffers: int) -> dict[str, str]:
    specs = [spec for _, spec in _specs(planned)]
    buffers = min(num_buffers, len(planned.chunks))
    largest = max(specs, key=lambda spec: spec.nbytes, default=None)
    return {
        "tensors": f"{planned.tensors:,}",
        "bytes": _exact(planned.nbytes),
        "dtypes": ", ".join(
            f"{name} ({count(number, 'tensor')}, {format_size(nbytes)})"
            for name, number, nbytes in _dtypes(specs)
        ),
        "largest tensor": f"{largest}, {_exact(largest.nbytes)}" if largest else "none",
        "chunks": f"{len(planned.chunks):,} in {count(len(planned.calls), 'call')}, "
        + count(planned.broadcasts, "broadcast"),
        "staging memory": f"{_exact(planned.staging_bytes(num_buffers))}: {buffers} x "
        + format_size(planned.largest_chunk),
    }


def _exact(nbytes: int) -> str:
    return f"{format_size(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1000 else format_size(nbytes)


def _dtypes(specs: list[TensorSpec]) -> list[tuple[str, int, int]]:
    """Name, tensors and bytes of each dtype, most bytes first."""
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for spec in specs:
        tensors[spec.dtype_name] += 1
        nbytes[spec.dtype_name] += spec.nbytes
    return [(name, tensors[name], size) for name, size in nbytes.most_common()]


def _chunk_rows(planned: Plan) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "tensors": len(chunk.specs),
            "bytes": sum(spec.nbytes for spec in chunk.specs),
            "first": chunk.specs[0].name,
            "last": chunk.specs[-1].name,
        }
        for index, chunk in enumerate(planned.chunks)
    ]


def _as_json(planned: Plan, num_buffers: int, tensors: bool) -> dict[str, Any]:
    specs = _specs(planned)
    value: dict[str, Any] = {
        "tensors": planned.tensors,
        "bytes": planned.nbytes,
        "dtypes": {
            name: {"tensors": number, "bytes": nbytes}
            for name, number, nbytes in _dtypes([spec for _, spec in specs])
        },
        "largest_tensor": max((spec.nbytes for _, spec in specs), default=0),
        "packed": planned.packed,
        "buffer_size": planned.buffer_size,
        "calls": len(planned.calls),
        "broadcasts": planned.broadcasts,
        "staging_bytes": planned.staging_bytes(num_buffers),
        "chunks": _chunk_rows(planned),
    }
    if tensors:
        value["tensor_list"] = [
            {
                "name": spec.name,
                "dtype": spec.dtype_name,
                "shape": list(spec.shape),
                "bytes": spec.nbytes,
                "chunk": index,
            }
            for index, spec in specs
        ]
    return value
