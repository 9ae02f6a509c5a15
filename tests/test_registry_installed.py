"""Case 41, with distributions that are installed: each broken one is named, all others work.

Everything goes through ``python -m streamer`` and ``PYTHONPATH``, as it does for a user.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.timeout(120)

SOURCE = """
import torch
from streamer import TensorSpec, WeightSource, hookimpl

class Source(WeightSource):
    def __init__(self, rest):
        self.rest = rest
    def specs(self):
        return [TensorSpec("w." + self.rest, torch.float32, (2,))]
    def __iter__(self):
        yield "w." + self.rest, torch.ones(2)

@hookimpl
def streamer_register_sources(register):
    register("{scheme}", Source, summary="{scheme} weights")

class Plugin:
    @hookimpl
    def streamer_register_sources(self, register):
        register("{scheme}", Source)
"""
# Distribution, entry points, module (its name is that of the distribution).
INSTALLED = [
    ("good", {"good": "good"}, SOURCE.format(scheme="good")),
    ("importing", {"importing": "importing"}, "raise ImportError('needs acme>=2\\nor later')"),
    (
        "arguing",
        {"arguing": "arguing"},
        SOURCE.format(scheme="arguing").replace("(register):", "(register, colour):", 1),
    ),
    ("twice", {"twice": "twice", "zwice": "twice"}, SOURCE.format(scheme="twice")),
    ("classy", {"classy": "classy:Plugin"}, SOURCE.format(scheme="classy")),
    ("same_a", {"same_a": "same_a"}, SOURCE.format(scheme="same")),
    ("same_b", {"same_b": "same_b"}, SOURCE.format(scheme="same")),
]
BROKEN = {
    ("arguing", "arguing"): "colour",
    ("classy", "classy"): "it is a class: register a module or an instance of it",
    ("importing", "importing"): "ImportError: needs acme>=2 or later",
    ("same_b", "same_b"): "scheme same:// is taken by plugin same_a (same_a): "
    "choose another one, or uninstall that plugin",
    ("zwice", "twice"): "it is registered already, as twice (twice)",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions, most of them broken."""
    site = tmp_path_factory.mktemp("site")
    for name, points, code in INSTALLED:
        (site / f"{name}.py").write_text(code)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {value}" for point, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[streamer]", *lines, ""]))
    return site


def run(site: Path, *arguments: object) -> tuple[int, str, str]:
    """Run ``python -m streamer`` in pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "streamer", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    return done.returncode, done.stdout, done.stderr


def test_sources_names_each_broken_plugin_and_lists_all_others(site: Path) -> None:
    code, stdout, stderr = run(site, "sources")
    assert (code, stderr) == (0, "")
    lines = [line.split("\t") for line in stdout.splitlines()]
    broken = {(plugin, dist): error for scheme, error, plugin, dist in lines if scheme == "!"}
    assert broken.keys() == BROKEN.keys()
    for key, error in broken.items():
        assert BROKEN[key] in error
    working = {scheme: dist for scheme, _, _, dist in lines if scheme != "!"}
    assert (
        working.items()
        >= {
            "good": "good",
            "twice": "twice",
            "same": "same_a",
            "safetensors": "streamer",
            "module": "streamer",
        }.items()
    )
    assert not {"importing", "arguing", "classy"} & working.keys()


def test_everything_else_works(site: Path, tmp_path: Path) -> None:
    save_file({"built.in": torch.ones(3)}, tmp_path / "model.safetensors")
    for source, name in ((tmp_path, "built.in"), ("good://x", "w.x"), ("same://y", "w.y")):
        code, stdout, stderr = run(site, "plan", source, "--tensors")
        assert (code, stderr) == (0, ""), stderr
        assert name in stdout


def test_a_scheme_that_nobody_claims_is_told_with_what_may_be_why(site: Path) -> None:
    """In one line: what there is, and every plugin that did not load, with its distribution."""
    code, stdout, stderr = run(site, "plan", "importing://x")
    assert code != 0
    assert stdout == ""
    assert stderr.count("\n") == 1
    start, _, names = stderr.partition("; plugin ")[0].partition("; installed: ")
    assert start == "streamer: error: no source is registered for importing://"
    assert {"good", "twice", "same", "safetensors"} <= set(names.split(", "))
    for (plugin, distribution), error in BROKEN.items():
        assert f"plugin {plugin} ({distribution}) failed to load: " in stderr
        assert error in stderr
