"""Every snippet of README.md and docs/: Python is run, command lines are held against the commands.

What cannot be run here is run by another test, or is listed below with the reason.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import typer.main
from safetensors.torch import save_file
from torch import nn

import streamer
from kit_checks import find_free_port
from kit_pages import FENCE, ROOT, Snippet, pages, snippets
from streamer.cli import make_app
from streamer.integrations.transformers import StreamerCallback

RUN_ELSEWHERE = {
    "docs/plugins.md": "tests/testing/test_tutorial.py",
    "docs/frameworks.md": "tests/examples/test_frameworks.py",
    "docs/start.md": "tests/docs/test_start.py",
}
NOT_RUN = {
    ("docs/sources/huggingface.md", 0): "needs the Hub; tests/plugins/huggingface has one of ours",
}
WEIGHTS = {f"model.layers.{i}.qkv.weight": torch.full((6, 4), float(i)) for i in range(3)}


class Model(nn.Module):
    """Has what the snippets name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.qkv = nn.Linear(4, 6)
        self.value_head = nn.Linear(4, 1)


class Trainer:
    """As much of a Hugging Face Trainer as a callback needs that nobody calls."""

    def __init__(self) -> None:
        self.callback_handler = SimpleNamespace(callbacks=[])

    def train(self) -> None:
        assert len(self.callback_handler.callbacks) == 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


def python_snippets() -> list[Snippet]:
    return [each for each in snippets("python") if each.page not in RUN_ELSEWHERE]


@pytest.mark.parametrize("snippet", python_snippets(), ids=str)
def test_python(
    snippet: Snippet,
    server: Any,
    other_server: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs as it is, with the names that a reader has: a model, a training step, a server."""
    places = {
        "http://localhost:8000": server.url,
        "http://one:8000": server.url,
        "http://two:8000": other_server.url,
        "http://gpu7:8000": server.url,
        "10.0.0.5": "127.0.0.1",
        "29600": str(find_free_port()),
        "/models/Qwen3-8B": str(checkpoint),
    }
    code = compile(replaced(snippet.code, places), str(snippet), "exec")
    if snippet.key in NOT_RUN:
        return
    monkeypatch.chdir(checkpoint)
    server.heal()
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        names = {
            "StreamerCallback": StreamerCallback,
            "base": Model(),
            "contextlib": contextlib,
            "dist": SimpleNamespace(get_rank=lambda: 0),
            "key": "k3y-of-nobody",
            "model": Model(),
            "peft": adapters(),
            "session": stack.enter_context(streamer.connect(server.url)),
            "steps": 2,
            "streamer": streamer,
            "train": lambda step: None,
            "trainer": Trainer(),
            "url": server.url,
        }
        exec(code, names)
        if isinstance(names["session"], streamer.Session):
            names["session"].close()
    said_to_push = "push(" in snippet.code
    assert ("POST /update_weights" in server.calls) == said_to_push, capsys.readouterr()


def replaced(code: str, places: dict[str, str]) -> str:
    for place, there in places.items():
        code = code.replace(place, there)
    return code


def adapters() -> SimpleNamespace:
    """PEFT, with a configuration in the place of the dots."""
    config = peft.LoraConfig(r=2, target_modules=["linear"])
    return SimpleNamespace(get_peft_model=peft.get_peft_model, LoraConfig=lambda dots: config)


@pytest.mark.parametrize("key", NOT_RUN, ids=str)
def test_names_of_what_is_not_run(key: tuple[str, int]) -> None:
    """What a snippet calls of streamer is there."""
    [snippet] = [each for each in snippets("python") if each.key == key]
    called = re.findall(r"\bstreamer\.([\w.]+)\(", snippet.code)
    methods = re.findall(r"\bsession\.(\w+)\(", snippet.code)
    assert called or methods
    for name in called:
        assert callable(getattr(streamer, name)), name
    for name in methods:
        assert callable(getattr(streamer.Session, name)), name


def test_lists_name_what_is_there() -> None:
    keys = {each.key for each in snippets("python")}
    assert set(NOT_RUN) <= keys
    for page, test in RUN_ELSEWHERE.items():
        assert page in {each.page for each in snippets("python")}
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_no_language_is_left_out() -> None:
    known = {"python", "sh", "toml", ""}  # the last: what something prints
    assert {each.language for each in snippets()} <= known
    assert {each.page for each in snippets("toml")} <= set(RUN_ELSEWHERE)
    for path in pages():
        text = path.read_text()
        assert len(FENCE.findall(text)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE))


# -- command lines -------------------------------------------------------------------------------

Words = list[str]


def commands(code: str) -> Iterator[Words]:
    """The commands of a shell snippet, without assignments in front, or functions."""
    code = re.sub(r"^\w+\(\) \{\n.*?^\}\n", "", code, flags=re.MULTILINE | re.DOTALL)
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


def shell() -> list[tuple[str, Words]]:
    return [(str(each), words) for each in snippets("sh") for words in commands(each.code)]


def is_streamer(words: Words) -> None:
    group: Any = typer.main.get_command(make_app())
    context = group.make_context("streamer", list(words[1:]))
    name, command, rest = group.resolve_command(context, list(words[1:]))
    command.make_context(name, rest, parent=context)


def is_target(words: Words) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in words[1:]:
        assert re.search(rf"^{target}:", text, re.MULTILINE), f"the Makefile has no {target}"


def is_install(words: Words) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install"
    for what in words[2:]:
        found = re.fullmatch(r"(\.|streamer)(\[(\w+)\])?", what)
        assert found, what
        assert found[3] is None or found[3] in extras["optional-dependencies"], what


def is_vllm(words: Words) -> None:
    """Run, with a real vLLM, by tests/interop: here its one option that is ours to explain."""
    assert words[1] == "serve"
    config = json.loads(words[words.index("--weight-transfer-config") + 1])
    assert set(config) == {"backend"}
    assert config["backend"] in ("nccl", "streamer")


def is_script(words: Words) -> None:
    """A script of the repository with options that it has, or one that a page writes."""
    if words[1].startswith("-"):
        assert words[1:3] == ["-m", "pytest"]
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        return
    written = {match[1] for each in snippets() if (match := re.match(r"# (\w+\.py)\n", each.code))}
    if words[1] in written:
        return
    text = (ROOT / words[1]).read_text()
    for option in (word.strip("[]") for word in words if word.strip("[]").startswith("--")):
        assert f'"{option}"' in text, f"{words[1]} has no {option}"


def is_run(words: Words) -> None:
    """tests/interop/test_start_page.py, and tests/testing/test_tutorial.py."""


CHECKS: dict[str, Callable[[Words], None]] = {
    "streamer": is_streamer,
    "make": is_target,
    "pip": is_install,
    "vllm": is_vllm,
    "python": is_script,
    ".": is_run,
    "ask": is_run,
    "pytest": is_run,
}


@pytest.mark.parametrize(("where", "words"), shell(), ids=lambda value: str(value)[:80])
def test_command_line(where: str, words: Words) -> None:
    CHECKS[Path(words[0]).name or words[0]](words)


@pytest.mark.parametrize("line", ["streamer push x --to y --bogus", "streamer pusk", "make no"])
def test_what_is_wrong_is_seen(line: str) -> None:
    words = shlex.split(line)
    with pytest.raises(Exception, match=r"bogus|pusk|no\b"):
        CHECKS[words[0]](words)
