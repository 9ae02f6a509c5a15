"""`docs/plugins.md`, from top to bottom: each of its snippets is run as a reader would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TUTORIAL = Path(__file__).parents[2] / "docs" / "plugins.md"
URL = "http://localhost:8000"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+)\n")
SECONDS = 60


@pytest.mark.timeout(300)
def test_every_snippet_runs(tmp_path: Path, server: Any) -> None:
    """A snippet that begins with the name of a file is that file; any other is run there."""
    site = tmp_path / "site"
    project = tmp_path / "project"
    project.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        # `pip install .` as it stands, but offline, and not into the environment of the tests.
        "PIP_TARGET": str(site),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    output: dict[str, str] = {}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=project, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    server.heal()
    text = TUTORIAL.read_text().replace(URL, server.url)
    snippets = FENCE.findall(text)
    assert len(snippets) == text.count("\n```") // 2
    for language, snippet in snippets:
        named = FILE.match(snippet)
        if named:
            (project / named[1]).write_text(snippet)
        elif language == "python":
            run(sys.executable, "-c", snippet)
        else:
            assert language == "sh", f"nobody runs this: {snippet}"
            for line in snippet.splitlines():
                output[line.split()[0] + " " + "".join(line.split()[1:2])] = run(*line.split())

    assert "\nraw\ta folder of raw tensors: raw://folder\traw\tstreamer-raw\n" in (
        "\n" + output["streamer sources"]
    )
    assert "lm_head.weight" in output["streamer plan"]
    assert re.search(r"^1[0-9] passed", output["pytest "].splitlines()[-1].strip("= "))
    pushes = text.count("streamer.push(") + text.count("streamer push ")
    assert server.calls.count("POST /update_weights") == pushes == 3
    saved = json.loads((project / "weights" / "manifest.json").read_text())
    held = {
        item["name"]: torch.frombuffer(
            bytearray((project / "weights" / item["file"]).read_bytes()),
            dtype=getattr(torch, item["dtype"]),
        ).view(item["shape"])
        for item in saved
    }
    assert len(held) == 2
    assert server.holds(held)
