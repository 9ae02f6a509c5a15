"""Signals before a command runs, and once it is known how it ends. For those between see
``test_push.py``."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)

ENDS = [
    pytest.param("SIGINT", 130, "streamer: interrupted\n", id="Ctrl-C"),
    pytest.param("SIGTERM", 143, "streamer: terminated\n", id="SIGTERM"),
    pytest.param("SIGHUP", 129, "streamer: terminated\n", id="hang-up"),
]


def python(program: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a process that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=40
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["typer", "streamer.cli._errors", "streamer.cli.push"])
@pytest.mark.parametrize(("name", "code", "says"), ENDS)
def test_one_while_the_commands_are_imported(
    run: Callable[..., Any], tmp_path: Path, module: str, name: str, code: int, says: str
) -> None:
    """An importer that sends it stands for somebody who is quick."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys

class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, Sends())
""")
    ended = run("--version", PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.stdout, ended.stderr) == (code, "", says)


def test_a_second_one_while_the_first_is_told() -> None:
    program = """
import os, signal
from streamer.cli import _errors, main

def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)

_errors.log_to_stderr = _errors._say = interrupted
main()
"""
    assert python(program, "sources") == (130, "streamer: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "late", ["atexit.register(send)", "sys.late = Late()"], ids=["at exit", "after it"]
)
def test_one_as_the_process_ends(late: str, number: int) -> None:
    program = f"""
import atexit, os, sys
from streamer.cli import main

def send(kill=os.kill, pid=os.getpid()):
    kill(pid, {int(number)})

class Late:
    def __del__(self, send=send):
        send()

{late}
main()
"""
    assert python(program, "--version") == (0, "")


def test_one_ends_the_wait_for_a_thread_that_is_stuck() -> None:
    program = """
import os, signal, threading, time
from streamer.cli import main

threading.Thread(target=time.sleep, args=(60,)).start()
threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
main()
"""
    started = time.monotonic()
    assert python(program, "--version") == (130, "")
    assert time.monotonic() - started < 30


def test_what_was_told_to_outlive_its_terminal_does() -> None:
    """Under nohup."""
    program = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from streamer.cli import _errors, main

log_to_stderr = _errors.log_to_stderr
_errors.log_to_stderr = lambda debug: (os.kill(os.getpid(), signal.SIGHUP), log_to_stderr(debug))
import atexit
atexit.register(os.kill, os.getpid(), signal.SIGHUP)
main()
"""
    assert python(program, "sources") == (0, "")


def test_a_terminal_that_has_hung_up_takes_no_last_words() -> None:
    program = """
import os, pty, signal, sys
from streamer.cli import _errors, main

ours, theirs = pty.openpty()
os.dup2(theirs, 2)
os.close(theirs)
os.close(ours)  # what is written to stderr now is an error
_errors.log_to_stderr = lambda debug: os.kill(os.getpid(), signal.SIGHUP)
main()
"""
    assert python(program, "sources") == (129, "")
