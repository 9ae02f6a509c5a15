"""docs/start.md, "A real vLLM": run in a shell as a reader would, on a port of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import requests

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SECONDS = 240


def test_a_real_vllm(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    text = (ROOT / "docs" / "start.md").read_text().partition("## A real vLLM")[2]
    text = text.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")
    made, serve, push = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert made.startswith("make vllm\n")  # which is done
    for name in (".venv", ".vllm", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def shell(code: str) -> str:
        command = ["bash", "-euc", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    shell(made.removeprefix("make vllm\n"))
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["bash", "-euc", f"exec env {serve}"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + SECONDS
        up = False
        while not up:
            assert server.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, log.read_text()[-8000:]
            with contextlib.suppress(requests.ConnectionError):
                up = requests.get(f"http://127.0.0.1:{port}/get_world_size", timeout=5).ok
            time.sleep(0.3)
        said = shell(push)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert said.count("; arrival: digest") == 2
    answers = [json.loads(line) for line in re.findall(r"\{.*\}", said)]
    first, second = (answer["choices"][0]["token_ids"] for answer in answers)
    assert len(first) == len(second) == 8
    assert first != second
