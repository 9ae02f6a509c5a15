"""docs/start.md up to vLLM: run from top to bottom as a reader would, in an empty folder.

What starts a server is left out, and there is one. The rest of the page is run by
tests/interop/test_start_page.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kit_pages import ROOT, snippets

URL = "http://127.0.0.1:8000"
LEFT_OUT = (". .venv/bin/activate", "streamer serve --port 8000", "make demo")
SECONDS = 60


@pytest.mark.timeout(300)
def test_page_up_to_vllm(server: Any, tmp_path: Path) -> None:
    server.heal()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    output: dict[str, str] = {}
    for snippet in snippets():
        if snippet.page != "docs/start.md" or snippet.heading.startswith("A real vLLM"):
            continue
        code = snippet.code.replace(URL, server.url)
        if snippet.language == "python":
            named = re.match(r"# ([\w.]+)\n", code)
            assert named, code
            (tmp_path / named[1]).write_text(code)
            continue
        for line in code.splitlines():
            if line in LEFT_OUT:
                continue
            done = subprocess.run(
                line.split(),
                cwd=tmp_path,
                env=environment,
                timeout=SECONDS,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            output[" ".join(line.split()[:2])] = done.stdout
            if line.startswith("streamer push"):
                assert server.holds(load_file(tmp_path / "weights" / "model.safetensors"))
    assert list(output) == [
        "python make_weights.py",
        "streamer plan",
        "streamer doctor",
        "streamer push",
        "python train.py",
    ]
    assert "; arrival: digest" in output["streamer push"]
    assert re.findall(r"^(step-\d): 2 tensors", output["python train.py"], re.MULTILINE) == [
        "step-0",
        "step-1",
        "step-2",
    ]
    assert server.weight_version == "step-2"


def test_demo_is_what_the_makefile_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: .*\n\t@\$\(BIN\)/streamer demo$", makefile, re.MULTILINE)


def test_readme_starts_vllm_as_the_page_does() -> None:
    """That page is run from top to bottom."""
    page = (ROOT / "docs" / "start.md").read_text()
    section = (ROOT / "README.md").read_text().partition("## In five minutes")[2]
    commands = section.partition("\n```\n")[0].partition("```sh\nmake demo vllm\n")[2]
    assert commands.count("\n") == 3
    assert all(line in page for line in commands.splitlines())
