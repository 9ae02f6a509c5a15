"""Readers, slots and cores of a connected push from disk to GPUs, in turns: which are best here.

    python benchmarks/reader_settings.py [--url http://127.0.0.1:8000] --checkpoint FOLDER \
        [--settings 16:8:256,12:8:128,16:8:256:0-15] [--rounds 3] [--pushes 5] [--json FILE]

Without ``--url`` the broadcasts reach nobody: what the sending side takes by itself. A setting is
``threads:slot MiB:ring MiB[:cores]``. Each is a process of its own, and every round goes through
all, so that what changes on the machine meanwhile meets each. Prints the median and the least
seconds of all pushes but the first of each process, from open to finish.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
SETTINGS = "16:8:256,12:8:128,20:8:320,16:16:512,24:8:256"


def cores(text: str) -> set[int]:
    """The cores of ``0-7+16-23``."""
    ranges = [part.partition("-") for part in text.split("+")]
    return {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)}


def push(arguments: argparse.Namespace, setting: str) -> list[dict[str, float]]:
    """The seconds of each push, in this process."""
    threads, slot, ring, *where = setting.split(":")
    if where:  # before a thread or pinned memory is there
        os.sched_setaffinity(0, cores(where[0]))
    import streamer
    from streamer.broadcast import fill, staging

    vars(fill)["SLOT_SIZE"] = vars(staging)["SLOT_SIZE"] = int(slot) * MIB
    vars(staging)["RING_SIZE"] = int(ring) * MIB
    if not arguments.url:
        return to_nobody(streamer.open_source(arguments.checkpoint), int(threads), arguments.pushes)
    with streamer.connect(arguments.url, threads=int(threads)) as session:
        reports = [session.push(arguments.checkpoint) for _ in range(arguments.pushes + 1)]
    return [report.as_json()["seconds"] for report in reports[1:]]


def to_nobody(source: Any, threads: int, pushes: int) -> list[dict[str, float]]:
    """The same without servers."""
    import torch

    from streamer.bench.measure import timed
    from streamer.bench.read import Reading

    everything = 1 << 60
    with contextlib.closing(
        Reading(source, torch.device("cuda", 0), threads, sample=everything)
    ) as reading:
        seconds = [timed(reading.run)() for _ in range(pushes + 1)][1:]
    return [{"total": each, "update": each, "finish": 0.0} for each in seconds]


def beside(arguments: argparse.Namespace, setting: str) -> list[dict[str, float]]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--url", arguments.url, "--only", setting]
    command += ["--checkpoint", arguments.checkpoint, "--pushes", str(arguments.pushes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}:\n{done.stderr[-2000:]}")
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(push(arguments, arguments.only)))
        return
    settings = arguments.settings.split(",")
    found: dict[str, list[dict[str, float]]] = {setting: [] for setting in settings}
    for _ in range(arguments.rounds):
        for setting in settings:
            found[setting] += beside(arguments, setting)
    print(f"{'threads:slot:ring':24} {'median':>7} {'least':>7} {'update':>7} {'finish':>7}")
    for setting, seconds in found.items():
        total = [each["total"] for each in seconds]
        parts = [statistics.median(each[part] for each in seconds) for part in ("update", "finish")]
        figures = [statistics.median(total), min(total), *parts]
        print(f"{setting:24} " + " ".join(f"{figure:7.3f}" for figure in figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
