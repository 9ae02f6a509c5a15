"""What a push costs the host a tensor: planning, and many small tensors through the broadcaster.

    python benchmarks/planning.py [--plan 100000] [--small 50000] [--repeats 5]

First ``--plan`` specs are planned, in both modes. Then a dict of ``--small`` tensors of 16 KiB, as
a fine-grained mixture of experts has them, goes through everything that a push does on this side,
into a transport that sends nothing: opening it as a source and asking for its specs, planning, and
then iterating it, staging it and handing it over, which run at the same time. Iterating alone, and
copying the same bytes at once (the limit of staging), are measured beside it. Prints the median of
the seconds, and microseconds a tensor: in the median, and of the processor on the thread that
pushes, at the least, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import streamer
from streamer.bench.machine import describe_machine, describe_versions
from streamer.bench.read import Reading
from streamer.cli._output import draw_table
from streamer.defaults import DEFAULT_THREADS
from streamer.plan import Plan, make_plan
from streamer.source import TensorSpec, checked

SMALL = 16 << 10
PARTS = ("open, specs", "plan", "iterate, stage, send")


Spent = list[tuple[float, float]]
"""Of each run: seconds, and seconds of the processor on this thread."""


def timed(step: Callable[[], object], repeats: int) -> Spent:
    """What each run but the first has taken."""
    spent = []
    for _ in range(repeats + 1):
        started, used = time.perf_counter(), time.thread_time()
        step()
        spent.append((time.perf_counter() - started, time.thread_time() - used))
    return spent[1:]


def specs_of(count: int) -> list[TensorSpec]:
    """The specs of a mixture of experts, with a norm in float32 among the matrices of a layer."""
    return [
        TensorSpec(f"model.layers.{i // 128}.experts.{i % 128}.weight", dtype, (32, 256))
        for i in range(count)
        for dtype in (torch.float32 if i % 128 == 0 else torch.bfloat16,)
    ]


def planning(count: int, repeats: int) -> dict[str, Spent]:
    specs = specs_of(count)

    def whole(packed: bool) -> Plan:
        plan = make_plan(specs, packed=packed)
        # What a session asks of it.
        assert plan.tensors == count
        assert plan.nbytes
        assert plan.largest_chunk
        return plan

    return {
        "plan, packed": timed(lambda: whole(True), repeats),
        "plan, per tensor": timed(lambda: whole(False), repeats),
    }


def small(count: int, repeats: int, device: torch.device) -> dict[str, Spent]:
    memory = torch.zeros(count * SMALL // 2, dtype=torch.bfloat16, device=device)
    tensors = {
        f"model.layers.{i // 128}.experts.{i % 128}.weight": piece.view(32, 256)
        for i, piece in enumerate(memory.split(SMALL // 2))
    }
    target = torch.empty_like(memory)
    source = streamer.open_source(tensors)
    specs = list(source.specs())
    reading = Reading(source, device, DEFAULT_THREADS, sample=memory.nbytes)

    def copy() -> None:
        target.copy_(memory)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def iterate() -> None:
        for _ in checked(source, specs):
            pass

    try:
        return {
            "open, specs": timed(lambda: streamer.open_source(tensors).specs(), repeats),
            "plan": timed(lambda: make_plan(specs), repeats),
            "iterate, stage, send": timed(reading.run, repeats),
            "(iterate alone)": timed(iterate, repeats),
            "(one copy of the bytes)": timed(copy, repeats),
        }
    finally:
        reading.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=int, default=100_000)
    parser.add_argument("--small", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, Spent]] = {}
    for what, count, seconds in (
        ("plan", arguments.plan, planning(arguments.plan, arguments.repeats)),
        ("small", arguments.small, small(arguments.small, arguments.repeats, arguments.device)),
    ):
        found[what] = seconds
        rows = [(name, *figures(spent, count)) for name, spent in seconds.items()]
        if what == "small":
            runs = zip(*(seconds[part] for part in PARTS), strict=True)
            together = [tuple(map(sum, zip(*run, strict=True))) for run in runs]
            rows.append(("together", *figures(together, count)))
        draw_table((f"{count:,} tensors", ">seconds", ">us a tensor", ">of our thread"), rows)
    machine, versions = describe_machine(), describe_versions()
    print(f"{machine['cores']} cores, {machine['gpus'] or 'no GPU'}, load {machine['load']}")
    print(versions)
    if arguments.json is not None:
        found_on = {"machine": machine, "versions": versions, "seconds": found}
        arguments.json.write_text(json.dumps(found_on, indent=2))


def figures(spent: Spent, count: int) -> tuple[str, str, str]:
    median = statistics.median(seconds for seconds, _ in spent)
    least = min(used for _, used in spent)
    return f"{median:.3f}", f"{median / count * 1e6:.2f}", f"{least / count * 1e6:.2f}"


if __name__ == "__main__":
    main()
