"""What `streamer` exports, and what can be done before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamer


@pytest.mark.parametrize("name", streamer.__all__)
def test_every_name_is_there(name):
    assert getattr(streamer, name) is not None
    assert name in dir(streamer)


def test_no_other_name_is_there():
    with pytest.raises(AttributeError, match="module 'streamer' has no attribute 'pull'"):
        _ = streamer.pull


@pytest.mark.parametrize("module", ["streamer", "streamer.cli.push", "streamer.receiver.server"])
def test_torch_is_not_waited_for(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "False\n", printed.stderr


def test_a_signal_does_not_break_the_import_of_torch_off():
    code = """
import os, signal, sys
from streamer.cli._torch import import_torch

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
try:
    import_torch()
except KeyboardInterrupt:
    print("interrupted", hasattr(sys.modules["torch"], "compile"))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "interrupted True\n", printed.stderr
