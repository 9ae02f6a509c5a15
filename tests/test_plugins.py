"""Finding plugins. Third parties are real distributions on `sys.path`."""

from __future__ import annotations

import importlib
import sys
import textwrap
from types import ModuleType

import pytest

import streamer
from kit_plugins import EVENT, Plain, plugin_of
from streamer import (
    PluginError,
    hookimpl,
    registry,
)
from streamer.registry import Registry

PREAMBLE = """
import streamer
from streamer import TensorSpec, WeightSource, hookimpl

class Source(WeightSource):
    def __init__(self, rest, *, flavour="plain"):
        self.rest, self.flavour = rest, flavour
    def specs(self):
        return []
    def __iter__(self):
        return iter(())
"""

GOOD = """
@hookimpl
def streamer_register_sources(register):
    register("{scheme}", Source, summary="{scheme} weights")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution of one module: ``install("acme-weights", "acme", code)``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def write(distribution: str, module: str, code: str, points: dict[str, str] | None = None):
        (tmp_path / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(code))
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}" for name, value in (points or {module: module}).items()]
        (folder / "entry_points.txt").write_text("[streamer]\n" + "\n".join(lines) + "\n")
        modules.append(module)
        importlib.invalidate_caches()

    yield write
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def load():
    """A registry of everything that is installed now."""

    def load() -> Registry:
        found = Registry()
        found.load_entry_points()
        return found

    return load


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not opened a source yet."""
    monkeypatch.setattr(registry, "_default", None)


def test_the_example_of_the_documentation(fresh, tmp_path, monkeypatch):
    """A class of a source, a hook that registers it, and the scheme works."""
    (tmp_path / "streamer_ones.py").write_text(
        textwrap.dedent(
            """
            import torch
            from streamer import TensorSpec, WeightSource, hookimpl

            class Ones(WeightSource):
                def __init__(self, rest):
                    self.count = int(rest)

                def specs(self):
                    names = [f"ones.{i}" for i in range(self.count)]
                    return [TensorSpec(name, torch.bfloat16, (4, 4)) for name in names]

                def __iter__(self):
                    for spec in self.specs():
                        yield spec.name, torch.ones(spec.shape, dtype=spec.dtype)

            @hookimpl
            def streamer_register_sources(register):
                register("ones", Ones, summary="ones")
            """
        )
    )
    folder = tmp_path / "streamer_ones-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: streamer-ones\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text("[streamer]\nones = streamer_ones\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        source = streamer.open_source("ones://3")
        assert [spec.name for spec in source.specs()] == ["ones.0", "ones.1", "ones.2"]
        assert [(name, tensor.sum().item()) for name, tensor in source] == [
            (f"ones.{i}", 16.0) for i in range(3)
        ]
        entry = registry.default_registry().entries["ones"]
        assert (entry.summary, entry.plugin, entry.distribution) == (
            "ones",
            "ones",
            "streamer-ones",
        )
        assert not entry.built_in
    finally:
        sys.modules.pop("streamer_ones", None)


def test_the_built_in_sources_come_through_the_same_door(load):
    found = load()
    assert found.broken == []
    entry = found.entries["safetensors"]
    assert entry.built_in
    assert entry.distribution == "streamer"
    assert entry.summary


def test_plugins_are_loaded_once_a_process(fresh, install):
    install("acme", "acme_once", GOOD.format(scheme="once"))
    assert registry.default_registry() is registry.default_registry()
    assert streamer.open_source("once://x") is not streamer.open_source("once://x")


# Case 41: each broken plugin is named with its distribution, and the others go on working.


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import no_such_library_at_all", "ModuleNotFoundError: No module named 'no_such"),
        ("raise ImportError('needs acme>=2\\nand more')", "ImportError: needs acme>=2 and more"),
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
        ("def broken(:", "SyntaxError"),
        (
            "@hookimpl\ndef streamer_register_sources(register, colour): pass",
            "colour",
        ),
        ("@hookimpl\ndef streamer_register_source(register): pass", "streamer_register_source"),
        (
            "@hookimpl\ndef streamer_register_sources(register): raise OSError('no licence')",
            "OSError: no licence",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register): register('Bad Scheme', Source)",
            "scheme 'Bad Scheme' must match",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register): register('safetensors', Source)",
            "scheme safetensors:// is taken by plugin safetensors (streamer)",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register):\n"
            "    register('twice', Source)\n    register('twice', Source)",
            "scheme twice:// is taken by plugin broken (acme-broken)",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register):\n"
            "    register('opt', Source, sumary='')",
            "sumary",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register): register('opt', None)",
            "the factory of opt:// must be callable, as factory(rest, **options), not None",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register):\n"
            "    register('opt', Source, accepts='Model')",
            "accepts of opt:// must be callable, as accepts(obj), not 'Model'",
        ),
        (
            "@hookimpl\ndef streamer_register_sources(register): register(None, Source)",
            "scheme None must match",
        ),
    ],
    ids=[
        "not-installed",
        "import-error",
        "raises",
        "syntax",
        "unknown-argument",
        "unknown-hook",
        "hook-raises",
        "bad-scheme",
        "built-in-scheme",
        "own-scheme-twice",
        "unknown-option",
        "no-factory",
        "no-claim",
        "no-scheme",
    ],
)
def test_a_broken_plugin_is_set_aside_and_named(install, load, tmp_path, code, named):
    install("acme-broken", "acme_broken", code, {"broken": "acme_broken"})
    install("zeta", "zeta_good", GOOD.format(scheme="zeta"))
    found = load()
    (broken,) = found.broken
    assert (broken.plugin, broken.distribution) == ("broken", "acme-broken")
    assert named in broken.error
    assert broken.error.isprintable()
    assert set(found.entries) >= {"safetensors", "zeta"}
    assert found.open("zeta://rest").rest == "rest"
    with pytest.raises(PluginError) as caught:
        found.open("nothing://x")
    assert "plugin broken (acme-broken) failed to load" in str(caught.value)
    assert named in str(caught.value)


def test_an_entry_point_to_nothing_is_set_aside(install, load):
    install("acme", "acme_empty", "", {"gone": "acme_empty:plugin", "lost": "no_module_here"})
    found = load()
    assert [(item.plugin, item.distribution) for item in found.broken] == [
        ("gone", "acme"),
        ("lost", "acme"),
    ]
    assert "AttributeError" in found.broken[0].error
    assert "ModuleNotFoundError" in found.broken[1].error


def test_a_plugin_that_exits_on_import_takes_nothing_with_it(install, load):
    install("acme", "acme_exits", "import sys\nsys.exit('bad environment')")
    found = load()
    assert [item.distribution for item in found.broken] == ["acme"]
    assert "safetensors" in found.entries


def test_a_plugin_that_exits_in_its_hook_takes_nothing_with_it(install, load):
    code = "@hookimpl\ndef streamer_register_sources(register): raise SystemExit(3)"
    install("acme", "acme_leaves", f"from streamer import hookimpl\n{code}")
    found = load()
    assert [(item.distribution, item.error) for item in found.broken] == [("acme", "SystemExit: 3")]
    assert "safetensors" in found.entries


def test_a_plugin_without_any_hook_is_named(install, load):
    """Most likely the marker was forgotten: in silence nobody would find out."""
    install("acme", "acme_bare", "def streamer_register_sources(register): register('s', Source)")
    found = load()
    assert [item.distribution for item in found.broken] == ["acme"]
    assert "hookimpl" in found.broken[0].error


def test_two_plugins_for_one_scheme(install, load):
    """The first by name keeps it, whatever the order of the folders; the second is named."""
    install("zeta", "zeta_one", GOOD.format(scheme="same"), {"aaa": "zeta_one"})
    install("acme", "acme_two", GOOD.format(scheme="same"), {"bbb": "acme_two"})
    found = load()
    assert found.entries["same"].distribution == "zeta"
    (broken,) = found.broken
    assert (broken.plugin, broken.distribution) == ("bbb", "acme")
    assert broken.error == (
        "scheme same:// is taken by plugin aaa (zeta): choose another one, or uninstall that plugin"
    )


def test_two_plugins_of_one_name(install, load):
    install("acme", "acme_one", GOOD.format(scheme="one"), {"weights": "acme_one"})
    install("zeta", "zeta_two", GOOD.format(scheme="two"), {"weights": "zeta_two"})
    found = load()
    assert "one" in found.entries
    assert "two" not in found.entries
    (broken,) = found.broken
    assert (broken.plugin, broken.distribution) == ("weights", "zeta")
    assert broken.error == "a plugin of this name is registered already, by acme: rename it"


@pytest.mark.parametrize(
    "hook",
    [GOOD.format(scheme="again"), "@hookimpl\ndef streamer_on_event(event): pass"],
    ids=["sources", "observer"],
)
def test_the_same_plugin_under_two_names(install, load, hook):
    install("acme", "acme_again", hook, {"first": "acme_again", "second": "acme_again"})
    install("zeta", "zeta_good", GOOD.format(scheme="zeta"))
    found = load()
    assert [(item.plugin, item.distribution) for item in found.broken] == [("second", "acme")]
    assert {"safetensors", "zeta"} <= set(found.entries)


def test_a_class_is_named_as_one(install, load):
    code = """
    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register):
            register("cls", Source)

    instance = Plugin()
    """
    install("acme", "acme_class", code, {"c": "acme_class:Plugin", "i": "acme_class:instance"})
    found = load()
    (broken,) = found.broken
    assert (broken.plugin, broken.distribution) == ("c", "acme")
    assert "is a class" in broken.error
    assert "instance" in broken.error
    assert found.open("cls://here").rest == "here"


def test_an_instance_or_a_module_can_be_registered_by_hand(fresh):
    class Notebook:
        @hookimpl
        def streamer_register_sources(self, register):
            register("notebook", Plain)

    streamer.register_plugin(Notebook())
    streamer.register_plugin(plugin_of("byhand"), "a-name")
    assert streamer.open_source("notebook://a").rest == "a"
    assert registry.default_registry().entries["byhand"].plugin == "a-name"
    assert registry.default_registry().entries["byhand"].distribution == "in-process"
    with pytest.raises(PluginError, match=r"plugin Notebook \(in-process\): .* registered already"):
        streamer.register_plugin(Notebook())
    with pytest.raises(PluginError, match="is a class: register a module or an instance of it"):
        streamer.register_plugin(Notebook, "other")


def test_the_same_plugin_by_hand_under_another_name_is_refused():
    found = Registry()

    class Observer:
        @hookimpl
        def streamer_on_event(self, event):
            pass

    observer = Observer()
    found.add(observer, "one")
    with pytest.raises(PluginError, match=r"two.*registered already"):
        found.add(observer, "two")


def test_a_refused_plugin_leaves_nothing_behind():
    found = Registry()
    module = ModuleType("two_schemes")

    @hookimpl
    def streamer_register_sources(register):
        register("fine", Plain)
        register("NOT FINE", Plain)

    module.streamer_register_sources = streamer_register_sources
    with pytest.raises(PluginError, match=r"plugin two_schemes \(in-process\): scheme 'NOT FINE'"):
        found.add(module)
    assert found.entries == {}
    assert found.call_on_event(EVENT) == []
    found.add(plugin_of("fine"), "two_schemes")
