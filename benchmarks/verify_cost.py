"""What ``verify`` costs: the digest alone, and pushes with and without it, to a reference server.

    python benchmarks/verify_cost.py                     # CPU, Gloo, two workers
    python benchmarks/verify_cost.py --device cuda       # two GPUs, NCCL: the worker on the first

The weights are in memory on the device that sends and the workers throw them away, so this is the
largest share that the digest can have of a push.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

import streamer
from streamer.cli._output import draw_table
from streamer.cli._reference import reference_server
from streamer.digest import StreamDigest
from streamer.report import Report


class InMemory(streamer.WeightSource):
    """``count`` bfloat16 matrices of ``side`` and, before each, ten vectors."""

    def __init__(self, count: int, side: int, device: torch.device) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for layer in range(count):
            for number in range(10):
                self._tensors[f"{layer}.v{number}"] = torch.randn(side, device=device).bfloat16()
            words = torch.randint(-(2**62), 2**62, (side * side // 4,), device=device)
            self._tensors[f"{layer}.m"] = words.view(torch.bfloat16).view(side, side)

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return [
            streamer.TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def digest_rows(device: torch.device) -> Iterator[Sequence[str]]:
    """The digest of 256 MiB at once, and in small pieces."""
    data = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device=device)
    for what, pieces in (
        ("256 MiB", [data] * 8),
        ("16 MiB", data.split(16 << 20)),
        ("1 MiB", data.split(1 << 20)),
        ("8 KiB", data[: 64 << 20].split(8 << 10)),
    ):
        took = []
        for _ in range(6):
            digest = StreamDigest(device)
            started = time.perf_counter()
            for piece in pieces:
                digest.add(piece)
            digest.hexdigest()
            took.append(time.perf_counter() - started)
        seconds = statistics.median(took[1:])
        nbytes = sum(piece.numel() for piece in pieces)
        rate, each = nbytes / seconds / 1e9, seconds / len(pieces) * 1e6
        yield what, f"{rate:.1f}", f"{each:.1f}"


def push_rows(device: torch.device, arguments: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Pushes in both modes, with and without, in turns."""
    cuda = device.type == "cuda"
    source = InMemory(arguments.count, arguments.side, device)
    workers = ["--workers", "1" if cuda else "2", "--device", device.type, "--discard"]
    with reference_server(*workers) as server:
        url = server.url()
        for packed in (True, False):
            reports: dict[bool, list[Report]] = {False: [], True: []}
            for verify in (False, True):
                options: dict[str, object] = {"device": device} if cuda else {}
                with streamer.connect(url, verify=verify, packed=packed, **options) as session:
                    reports[verify] = [session.push(source) for _ in range(arguments.repeats + 1)]
            plain, proven = (
                statistics.median(report.seconds.update for report in reports[verify][1:])
                for verify in (False, True)
            )
            cost = statistics.median(report.seconds.verify for report in reports[True][1:])
            assert all(s.verified == "digest" for r in reports[True] for s in r.servers)
            yield (
                "packed" if packed else "per tensor",
                f"{reports[True][0].bytes / 1e9:.2f}",
                f"{plain:.3f}",
                f"{proven:.3f}",
                f"{100 * (proven / plain - 1):+.1f} %",
                f"{cost:.3f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, help="matrices (16; with cuda 128)")
    parser.add_argument("--side", type=int, help="rows and columns of each (4096; with cuda 8192)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    arguments.count = arguments.count or (128 if cuda else 16)
    arguments.side = arguments.side or (8192 if cuda else 4096)
    device = torch.device("cuda:1" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device) if cuda else 'CPU'}")
    draw_table(("digest of pieces", ">GB/s", ">us each"), list(digest_rows(device)))
    columns = ("mode", ">GB", ">update s", ">with verify s", ">more", ">digest s")
    draw_table(columns, list(push_rows(device, arguments)))


if __name__ == "__main__":
    main()
