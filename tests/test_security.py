"""What no module of ours may do: turn bytes of others into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamer

ROOT = Path(streamer.__file__).resolve().parent
FOLDERS = [ROOT, *sorted(ROOT.parent.glob("plugins/streamer_*"))]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"torch.load", "torch.save", "torch.jit.load", "np.load", "numpy.load", "yaml.load"}
# These of torch.distributed pickle what they are given.
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a module could run code that came as data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {name.name for name in node.names}
            yield from names & OBJECTS
            if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
            yield from {f"{node.module}.{name}" for name in names} & ATTRIBUTES
        elif isinstance(node, ast.Attribute):
            if node.attr in OBJECTS or ast.unparse(node) in ATTRIBUTES:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in NAMES:
                yield node.func.id
            if any(keyword.arg == "shell" for keyword in node.keywords):
                yield ast.unparse(node)


def test_no_module_of_ours_unpickles_or_evaluates():
    paths = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    assert len(paths) > 40
    found = {
        str(path): names for path in paths if (names := sorted(unsafe(ast.parse(path.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "eval('1')",
        "exec('1')",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert list(unsafe(ast.parse(code)))
