"""Do what the README says to a newcomer, from an empty folder, and write down what comes of it.

    python scripts/record_start.py REPOSITORY docs/terminals/start.txt

The commands are those of "In five minutes" in the README of the clone. Each line of the transcript
has the seconds since the start. A completion is asked for before the pushes and after each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

SECTION = "## In five minutes, without a GPU"
URL = "http://localhost:8000"
ASKED = {"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 8, "temperature": 0}
PATIENCE = 300
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Transcript:
    """Lines, each with its time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._started = time.monotonic()

    def add(self, text: str, sign: str = " ") -> None:
        self.lines.append(f"{time.monotonic() - self._started:5.0f} s {sign} {text}".rstrip())
        print(self.lines[-1], flush=True)

    def run(self, command: str, folder: Path, arguments: Sequence[str] | None = None) -> None:
        """Run ``command``, or what stands for it, and add what it prints; fail if it does."""
        self.add(command, "$")
        process = subprocess.Popen(
            arguments or ["bash", "-c", command],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        for line in process.stdout:
            # pip says with every package on some machines where it looks for others.
            if "ignored" not in line:
                self.add(_COLOURS.sub("", line.rstrip()).replace(str(folder), "…"))
        if process.wait():
            raise SystemExit(f"{command}: exit {process.returncode}")

    def ask(self) -> None:
        """A completion, as token ids."""
        body = json.dumps({**ASKED, "return_token_ids": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{URL}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            tokens = json.load(answer)["choices"][0]["token_ids"]
        self.add(f"curl {URL}/v1/completions -d '{json.dumps(ASKED)}'", "$")
        self.add(f"token_ids: {tokens}")


def commands(readme: str) -> list[str]:
    """The commands of the section, one each, as they stand there."""
    section = readme.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "\0").splitlines()]


def main(repository: str, target: str) -> None:
    transcript = Transcript()
    with tempfile.TemporaryDirectory() as empty, contextlib.ExitStack() as stack:
        clone = Path(empty) / "streamer"
        source = ["git", "clone", "--quiet", str(Path(repository).resolve()), str(clone)]
        transcript.run("git clone …/streamer && cd streamer", Path(empty), source)
        for command in commands((clone / "README.md").read_text()):
            shown, command = command.replace("\0", "\\\n" + 10 * " "), command.replace("\0", "")
            if " serve " not in command:
                transcript.run(shown, clone, ["bash", "-c", command])
                if " push " in command:
                    transcript.ask()
                continue
            transcript.add(shown + " &", "$")
            log = stack.enter_context((Path(empty) / "log").open("wb"))
            server = subprocess.Popen(
                ["bash", "-c", command], cwd=clone, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(os.killpg, server.pid, signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{URL}/health", timeout=5).close()
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((Path(empty) / "log").read_text()[-5000:])
                time.sleep(0.5)
            transcript.add("(it has started)")
            transcript.ask()
    Path(target).write_text("\n".join(transcript.lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
