"""Checks of what would be sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from streamer.broadcast.fill import SLOT_SIZE
from streamer.broadcast.staging import RING_SIZE
from streamer.doctor.finding import Finding, fail, ok, size
from streamer.doctor.here import free_host_memory, memory, sending_device
from streamer.drivers.base import Driver
from streamer.exceptions import PlanError, StreamerError
from streamer.options import Options
from streamer.plan import Plan, make_plan
from streamer.source import TensorSpec, WeightSource


def readable(
    weights: AbstractContextManager[WeightSource],
) -> tuple[Finding, Sequence[TensorSpec] | None]:
    """Whether the source can be opened and says what it holds; and what that is."""
    try:
        with weights as source:
            specs = list(source.specs())
    except Exception as error:
        text = (
            str(error) if isinstance(error, StreamerError) else f"{type(error).__name__}: {error}"
        )
        return fail("source", text, "correct SOURCE, or repair what it leads to"), None
    if not specs:
        return fail("source", "it has no tensors", "correct SOURCE, --select or --exclude"), None
    nbytes = sum(spec.nbytes for spec in specs)
    return ok("source", f"{len(specs):,} tensors, {size(nbytes)}"), specs


def sendable(
    specs: Sequence[TensorSpec], drivers: Sequence[Driver], options: Options
) -> tuple[Finding, Plan | None]:
    """Whether names and dtypes are such that these servers can receive them; and the plan."""
    name = "names and dtypes"
    try:
        plan = make_plan(specs, packed=options.packed, buffer_size=options.buffer_size)
    except PlanError as error:
        return fail(name, str(error), "rename or exclude one: --rename, --exclude"), None
    try:
        for driver in drivers:
            driver.check(plan)
    except StreamerError as error:
        return fail(name, str(error), "push packed, without --per-tensor"), plan
    dtypes = sorted({spec.dtype_name for spec in specs})
    return ok(name, f"{', '.join(dtypes)} in {len(plan.chunks):,} chunks"), plan


def staging(plan: Plan | None, on_gpus: bool, options: Options) -> Iterator[Finding]:
    """Whether the memory is there that chunks are staged in."""
    count = options.num_buffers
    need = count * options.buffer_size if plan is None else plan.staging_bytes(count)
    if not on_gpus:
        yield memory("staging memory", need, free_host_memory(), "on this host")
    elif torch.cuda.is_available():
        device = sending_device(options)
        free, _ = torch.cuda.mem_get_info(device)
        yield memory("staging memory", need, free, f"on {device}")
        ring = max(RING_SIZE, (options.threads + 1) * SLOT_SIZE)
        yield memory("pinned memory", ring, free_host_memory(), "on this host")
