"""What the sending side takes by itself on one GPU: tensors there, staged for nobody.

    python benchmarks/sender_alone.py --checkpoint FOLDER [--sizes 64,256,1024] [--num-buffers 2,3]

The tensors have the names, dtypes and shapes of ``--checkpoint``; nothing is read. Everything is
done that a push does but the calls to a server and the broadcasts. What the device takes runs
beside a broadcast; what the host takes for the first chunk does not. Medians, and the milliseconds
of the processor that the thread that pushes takes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

import streamer
from streamer.bench.machine import describe_machine, describe_versions
from streamer.bench.null import NullTransport
from streamer.broadcast.broadcaster import Broadcaster
from streamer.broadcast.stream import ChunkStream
from streamer.cli._output import draw_table
from streamer.plan import make_plan
from streamer.source import checked, specs_of

MIB = 1 << 20


def alone(
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    packed: bool,
    size: int,
    buffers: int,
    repeats: int,
) -> tuple[float, float]:
    """Median seconds, and seconds of the processor on this thread."""
    source = streamer.open_source(tensors)
    specs = specs_of(source)
    plan = make_plan(specs, packed=packed, buffer_size=size)
    transport = NullTransport(device)

    def conduct(stream: ChunkStream) -> None:
        for call in plan.calls:
            stream.send(call)
        transport.wait(30.0)

    spent = []
    with contextlib.closing(Broadcaster(transport, num_buffers=buffers)) as broadcaster:
        for _ in range(repeats + 1):
            started, used = time.perf_counter(), time.thread_time()
            payloads = checked(source, specs)
            broadcaster.sync(plan, payloads, conduct, source=source, progress_timeout=30.0)
            spent.append((time.perf_counter() - started, time.thread_time() - used))
    transport.close()
    seconds, processor = (statistics.median(column) for column in zip(*spent[1:], strict=True))
    return seconds, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--sizes", default="64,256,1024", help="MiB of a packed chunk")
    parser.add_argument("--num-buffers", default="2,3")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    specs = streamer.open_source(arguments.checkpoint).specs()
    tensors = {s.name: torch.empty(s.shape, dtype=s.dtype, device=arguments.device) for s in specs}
    rows = []
    for size in [*map(int, arguments.sizes.split(",")), 0]:
        for buffers in map(int, arguments.num_buffers.split(",")):
            seconds, used = alone(
                tensors,
                arguments.device,
                bool(size),
                (size or 256) * MIB,
                buffers,
                arguments.repeats,
            )
            mode = f"packed {size} MiB" if size else "per tensor"
            rows.append((mode, str(buffers), f"{1e3 * seconds:.1f}", f"{1e3 * used:.1f}"))
    draw_table(("mode", ">buffers", ">ms", ">of our thread"), rows)
    print(describe_machine(), describe_versions())


if __name__ == "__main__":
    main()
