"""Record what `streamer plan`, `doctor` and `push` show on a terminal, as docs/terminals/*.svg.

    python scripts/record_terminals.py CHECKPOINT --to URL

The commands are run in the folder of CHECKPOINT, on a terminal of 100 columns. What they print on
stdout is drawn as it came, colours included; what they write over themselves meanwhile (the bar of
a push) goes to stderr, and is not drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "docs" / "terminals"
COLUMNS = 100
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, monospace"
)
"""Rich's drawing of a terminal, without the fonts that it would fetch from elsewhere."""


def shown(command: Sequence[str], folder: Path) -> str:
    """What ``command`` prints on a terminal. Raises if it fails."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # so Linux tells that the last writer is gone
        while part := os.read(ours, 65536):
            parts.append(part)
    errors = process.communicate()[1]
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def draw(name: str, words: Sequence[str], output: str) -> None:
    """Write ``output`` under its command line as docs/terminals/NAME.svg."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    line = " ".join(f"'{word}'" if " " in word else word for word in words)
    console.print(Text.assemble(("$ ", "green"), (line, "bold")))
    console.print(Text.from_ansi(output.rstrip("\n")))
    FOLDER.mkdir(exist_ok=True)
    picture = console.export_svg(title=f"streamer {name}", code_format=FORMAT, unique_id=name)
    (FOLDER / f"{name}.svg").write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", required=True, metavar="URL")
    arguments = parser.parse_args()
    name, folder = arguments.checkpoint.name, arguments.checkpoint.absolute().parent
    for command in (
        ["plan", name, "--buffer-size", "256KiB"],
        ["doctor", name, "--to", arguments.to],
        ["push", name, "--to", arguments.to, "--verify"],
    ):
        output = shown([sys.executable, "-m", "streamer", *command], folder)
        draw(command[0], ["streamer", *command], output)


if __name__ == "__main__":
    main()
