"""Run the table of faults and write what came of it: ``python scripts/fault_table.py``.

Writes docs/faults.md from the properties that tests/faults records, and only if every test passes.
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
sys.path.insert(0, str(ROOT / "tests" / "faults"))
from fault_table import FILE, HTTP, KINDS, PHASES, PROCESS, SOURCE, Cell, not_a_cell  # noqa: E402

HEAD = """# Faults

What comes of a fault in each phase of a sync: the error, the seconds until it was raised, and what
the server holds and does then. Each cell is a test (tests/faults) with real processes over Gloo: a
reference server of two workers behind a proxy that spoils one call. In every cell the error is one
line that names the server, the tensor or the file; no thread and no descriptor is left in the
trainer; and the next sync **of the same session** succeeds, with equal checksums in every worker
(after the server was restarted, where it or a worker of its was killed).

Written by `python scripts/fault_table.py`; a run that fails a cell writes nothing. {where}

The tests set short deadlines where only a deadline ends a wait: connect 4 s (60 by default),
progress 1.5 s (120), 0.5 s for a server to say why the data plane broke (2), 1 s for each call that
cleans up (5). What is seen at once does not depend on them.

- `old`: as before the sync, and serving. `new`: the new weights, and serving.
- `mixture, paused, marked`: not to be served; the next sync repairs it. `old` or `new` with
  `paused, marked`: the same, though by chance nothing, or everything, had arrived, or the server
  has the new weights and could not be resumed.
- `new, paused`: the last, where it could not be asked, and so not marked either; the error says so.
- `dead`: the server or one of its workers was killed; restart it.
- —: no error, the sync succeeds.

How the proxy spoils a call: `500`, `404`, `HTML page` and `never` without the server being asked;
`garbage`, `closed` and `slow` once it has done what it was asked. `answer` is the last
`/update_weights`, received and answered by the server.
"""

TITLES = (
    ("The server's answer", HTTP),
    ("Processes", PROCESS),
    ("Files and sources", (*FILE, *SOURCE)),
)
NOTES = """`file replaced`: another file takes the name. Once reading has begun what was opened is
sent, whole. `file rewritten`: other bytes in the same file. `out of memory` is injected at the
allocation of the staging buffers (warm-up) or of the copy of one tensor."""


def run() -> dict[str, dict[str, str]]:
    """What each cell has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junitxml={path}"]
        command += ["-o", "junit_family=xunit1"]  # the only one that takes properties
        if subprocess.run([*command, "tests/faults"], cwd=ROOT).returncode != 0:
            sys.exit("a cell failed: docs/faults.md is left as it was")
        cells = {}
        for case in ElementTree.parse(path).iter("testcase"):
            values = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
            if "cell" in values:
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


def page(found: dict[str, dict[str, str]]) -> str:
    """The whole document."""
    import torch

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    where = f"The last run: {os.cpu_count()} cores of {cpu}, PyTorch {torch.__version__}."
    parts = [HEAD.format(where=where)]
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
    for kind in KINDS:
        texts = [
            found[name]["text"]
            for phase in PHASES
            if (name := str(Cell(phase, kind))) in found and found[name]["text"]
        ]
        if texts:
            parts.append(f"- {kind}: {texts[0].partition('; URL holds')[0]}")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "faults.md").write_text(page(run()))
