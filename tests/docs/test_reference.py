"""docs/reference: all that is public is there, with a docstring; what is generated is fresh."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamer
import streamer.integrations
import streamer.testing
from kit_pages import ROOT
from streamer.broadcast.fill import SLOT_SIZE
from streamer.defaults import DEFAULT_NUM_BUFFERS, DEFAULT_THREADS

DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?: +.*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"^ +members: \[(.*)\]", re.MULTILINE)
DOCUMENTED: dict[str, list[str] | None] = {
    match[1]: found[1].split(", ") if (found := MEMBERS.search(match[2])) else None
    for page in sorted(ROOT.glob("docs/reference/*.md"))
    for match in DIRECTIVE.finditer(page.read_text() + "\n")
}
"""The names on the pages, and which members are shown if not all are."""
SEAMS = ("streamer.drivers.base.Driver", "streamer.transport.base.Transport")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(name: str) -> Any:
    """The object of that name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def documented_assignments() -> dict[str, str]:
    """The names that are assigned in a module of the library, with the text behind them."""
    found = {}
    for path in sorted(ROOT.glob("streamer/**/*.py")):
        body = ast.parse(path.read_text()).body
        for statement, after in pairwise(body):
            match statement, after:
                case (
                    ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = text
    return found


def docstring(name: str) -> str | None:
    value = find(name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__doc__
    return documented_assignments().get(name.rpartition(".")[2])


def public_in_integrations() -> set[str]:
    names = set()
    for info in pkgutil.iter_modules(streamer.integrations.__path__):
        module = importlib.import_module(f"streamer.integrations.{info.name}")
        names |= {
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
        }
    return names


def test_all_that_is_public_is_there() -> None:
    names = {f"streamer.{name}" for name in streamer.__all__}
    names |= {f"streamer.testing.{name}" for name in streamer.testing.__all__}
    names |= public_in_integrations() | set(SEAMS)
    assert names - DOCUMENTED.keys() == set()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_has_a_docstring(name: str) -> None:
    text = docstring(name)
    assert text, f"{name} has no docstring"
    # Plain Markdown: what other tools would read as markup is shown as it is.
    assert "::\n" not in text
    assert not re.search(r":\w+:`|^ *\.\. ", text, re.MULTILINE)


def public_members() -> list[str]:
    found = []
    for name, members in DOCUMENTED.items():
        value = find(name)
        if inspect.isclass(value):
            shown = members or [each for each in vars(value) if each[0] != "_"]
            found += [f"{name}:{each}" for each in shown]
    return found


@pytest.mark.parametrize("name", public_members())
def test_its_methods_have_docstrings(name: str) -> None:
    owner, _, member = name.partition(":")
    value = inspect.getattr_static(find(owner), member)
    if inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod):
        assert inspect.getdoc(value), name


def test_command_line_is_as_it_says() -> None:
    """Else: python scripts/cli_reference.py"""
    written = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert written == script("cli_reference").reference()


def test_figure_is_the_drawing() -> None:
    """Else: python scripts/draw_pipeline.py"""
    drawing = script("draw_pipeline").draw()
    assert (ROOT / "docs" / "pipeline.svg").read_text() == drawing
    assert f"{SLOT_SIZE >> 20} MiB each" in drawing
    assert f"filled by {DEFAULT_THREADS} readers" in drawing
    assert f"{DEFAULT_NUM_BUFFERS} of the largest" in drawing


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_fetch_nothing(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"url\(\W?https?:|href=\W?https?:|@import|@font-face", text)
    ElementTree = importlib.import_module("xml.etree.ElementTree")
    ElementTree.fromstring(text)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Those of docs/ are checked by the build."""
    links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    """The build says so too, but not where the docs extra is missing."""
    text = (ROOT / "mkdocs.yml").read_text()
    for path in ROOT.glob("docs/**/*.md"):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert re.search(rf"(- |: ){re.escape(page)}$", text, re.MULTILINE), page
