"""`examples/fsdp_torchrun.py`, as its docstring says to run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[3] / "examples" / "fsdp_torchrun.py"


def test_torchrun(server: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=localhost", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, str(SCRIPT), "--to", server.url, "--steps", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        out, err = process.communicate(timeout=90)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err[-3000:]
    found = re.findall(r"step-(\d): loss ([\d.]+), 10 tensors, 0\.6 MB in", out)
    assert [step for step, _ in found] == ["0", "1"], out
    assert float(found[0][1]) > float(found[1][1])
    assert server.weight_version == "step-1"
    assert not server.paused
