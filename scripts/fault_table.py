"""Run the table of faults and write what came of it: ``fault_table.py [XML GPUS COMMIT]``.

Writes docs/faults.md from the properties that tests/faults records, and only if every test passes.
Given the faults.xml of a run on GPUs (tests/gpu/run.sh), their number and its commit, writes
docs/faults-nccl.md from that.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kit"))
from fault_table import FILE, HTTP, KINDS, PHASES, PROCESS, SOURCE, Cell, not_a_cell  # noqa: E402

HEAD = """# Faults

What comes of a fault in each phase of a sync: the error, the seconds until it was raised, and what
the server holds and does then. Each cell is a test (tests/faults) with real processes over Gloo: a
reference server of two workers behind a proxy that spoils one call. In every cell

- the error is one line that names the server, the tensor or the file;
- no thread and no descriptor is left in the trainer;
- the next sync **of the same session** succeeds, with equal checksums in every worker. If the fault
  killed the server or one of its workers, the server was restarted before.

The same between GPUs: [faults over NCCL](faults-nccl.md).

Written by `python scripts/fault_table.py`; a run that fails a cell writes nothing. The last run:
{where}.

Where only a deadline ends a wait, the tests set short ones; in brackets what a push has by default:
connect 4 s (60), progress 1.5 s (120), 0.5 s for a server to say why the data plane broke (2), 1 s
for each call that cleans up (5). What is seen at once does not depend on them.

| state | what it means |
|---|---|
| `old` | As before the sync, and serving. |
| `new` | The new weights, and serving. |
| `mixture, paused, marked` | Not to be served; the next sync repairs it. |
| `old, paused, marked` | As `mixture`, though by chance nothing had arrived. |
| `new, paused, marked` | As `mixture`, though all had arrived, or the resume failed. |
| `old, marked`, `new, marked` | As `old` or `new`; the next sync takes the mark away. |
| `new, paused` | As `new`, but nobody could resume or mark it; the error says so. |
| `dead` | The server or one of its workers was killed; restart it. |

`—` in place of an error: there is none, and the sync succeeds. With `or` it depends on the moment.

How the proxy spoils a call: `500`, `404`, `HTML page` and `never` without the server being asked;
`garbage`, `closed` and `slow` once it has done what it was asked. `answer` is the last
`/update_weights`, received and answered by the server.
"""

HEAD_NCCL = """# Faults over NCCL

The table of [faults](faults.md), which explains deadlines, states and kinds, over NCCL. There is a
reference server of one worker on one GPU. The trainer is on another GPU, or on the same one: then
NCCL is told that they are two hosts. The tests and the deadlines are the same. In every cell no
thread of the trainer is left, and the next sync of the same session succeeds with equal checksums.
What NCCL makes different:

- The chunks of these tests are so small that NCCL leaves them in the memory of a worker that is
  stopped. The trainer is through then, so the error says that, and not that no byte moved. Once the
  worker goes on, it may find them.
- If NCCL had begun to join when the fault struck, it leaves two sockets open, for good. So the
  trainer waits for the workers before it begins, if they have our engine.
- NCCL's own monitor (RAS) keeps a connection for each server that was there. It is off here, with
  `NCCL_RAS_ENABLE=0`.
- Of 200 syncs in a row, a fault in every tenth, the last verifies; threads, descriptors, keys and
  memory of trainer, server and worker do not grow. That takes `MALLOC_MMAP_THRESHOLD_=131072`:
  [NCCL alone](gpus.md#memory-and-speed), with nothing of ours, grows by 116 MiB in 40 joins without
  it, and by 0.7 MiB with it (`tests/gpu/growth.py`, one H200, a12e27c).

Written by `python scripts/fault_table.py faults.xml GPUS COMMIT`, from the part `faults` of
`tests/gpu/run.sh`. All of it held between two H200s at 1242cd5. The last run:
{where}.
"""
GPUS = {"1": "one H200, NCCL over the loopback network", "2": "two H200s"}
TITLES = (
    ("The server's answer", HTTP),
    ("Processes", PROCESS),
    ("Files and sources", (*FILE, *SOURCE)),
)
NOTES = """`file replaced`: another file takes the name. Once reading has begun what was opened is
sent, whole. `file rewritten`: other bytes in the same file. `out of memory` is injected at the
allocation of the staging buffers (warm-up) or of the copy of one tensor."""


def run() -> dict[str, dict[str, str]]:
    """What each cell has recorded, over Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junitxml={path}"]
        command += ["-o", "junit_family=xunit1"]  # the only one that takes properties
        if subprocess.run([*command, "tests/faults"], cwd=ROOT).returncode != 0:
            sys.exit("a cell failed: docs/faults.md is left as it was")
        return recorded(path)


def recorded(path: Path) -> dict[str, dict[str, str]]:
    """What each cell has recorded in a report of pytest's."""
    cells = {}
    for case in ElementTree.parse(path).iter("testcase"):
        values = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        if "cell" in values:
            if case.find("failure") is not None:
                sys.exit(f"{values['cell']} failed: nothing is written")
            cells[values["cell"]] = values
    return cells


def shown(found: dict[str, dict[str, str]], cell: Cell, notes: list[str]) -> str:
    """One cell; why there is none goes into ``notes``."""
    why = not_a_cell(cell.phase, cell.kind)
    if why:
        if why not in notes:
            notes.append(why)
        return f"[{notes.index(why) + 1}]"
    values = found[str(cell)]
    return f"{values['error'] or '—'} {float(values['seconds']):.1f} s: {values['state']}"


def this_machine() -> str:
    """Where Gloo was run."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, platform.machine())
    return f"{os.cpu_count()} cores of {cpu}, PyTorch {torch.__version__}"


def page(found: dict[str, dict[str, str]], head: str) -> str:
    """The whole document."""
    parts = [head]
    notes: list[str] = []
    for title, kinds in TITLES:
        parts.append(f"## {title}\n")
        parts.append(f"| | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}")
        for phase in PHASES:
            row = [shown(found, Cell(phase, kind), notes) for kind in kinds]
            parts.append(f"| {phase.name} | {' | '.join(row)} |")
        parts.append("")
    parts.append(NOTES + "\n\nNo cell of its own:\n")
    parts += [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    parts.append("\n## What the errors say\n\nOf each kind the first: `URL` is the server's.\n")
    parts.append("| fault | error |\n|---|---|")
    for kind in KINDS:
        texts = [
            found[name]["text"]
            for phase in PHASES
            if (name := str(Cell(phase, kind))) in found and found[name]["text"]
        ]
        if texts:
            text = texts[0].partition("; URL holds")[0].replace("|", r"\|")
            parts.append(f"| {kind} | `{text}` |")
    return "\n".join(parts) + "\n"


def main() -> None:
    """Entry point."""
    if len(sys.argv) > 1:
        where = f"{GPUS[sys.argv[2]]}, PyTorch 2.11, NCCL 2.28.9, commit {sys.argv[3]}"
        text, name = page(recorded(Path(sys.argv[1])), HEAD_NCCL.format(where=where)), "faults-nccl"
    else:
        text, name = page(run(), HEAD.format(where=this_machine())), "faults"
    (ROOT / "docs" / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
