"""Finding plugins and choosing a source. Third parties are real distributions on `sys.path`."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import streamer
from streamer import (
    PluginError,
    SourceError,
    TensorSpec,
    UsageError,
    WeightSource,
    hookimpl,
    registry,
)
from streamer.events import SyncStarted
from streamer.registry import Registry

EVENT = SyncStarted(1, 4, 1, ("http://host:1",))

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


class Plain(WeightSource):
    def __init__(self, rest, **options):
        self.rest = rest
        self.options = options

    def specs(self):
        return [TensorSpec("w", torch.float32, (1,))]

    def __iter__(self):
        yield "w", torch.zeros(1)


def plugin_of(scheme="x", factory=Plain, **claims):
    """A plugin that registers one scheme."""
    module = ModuleType(f"plugin_{scheme}")

    @hookimpl
    def streamer_register_sources(register):
        register(scheme, factory, **claims)

    module.streamer_register_sources = streamer_register_sources
    return module


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
    assert broken.error == "scheme same:// is taken by plugin aaa (zeta)"


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


# Which source opens what.


def test_an_unknown_scheme_lists_what_there_is():
    found = Registry()
    found.add(plugin_of("beta"))
    found.add(plugin_of("alpha"))
    with pytest.raises(PluginError) as caught:
        found.open("gamma://x")
    assert str(caught.value) == "no source is registered for gamma://; installed: alpha, beta"
    with pytest.raises(PluginError, match="installed: none"):
        Registry().open("gamma://x")


def test_a_uri_opens_its_scheme_with_what_follows_and_options():
    found = Registry()
    found.add(plugin_of("s3+fast"))
    opened = found.open("S3+Fast://bucket/key?x=1#y\nz", region="eu")
    assert opened.rest == "bucket/key?x=1#y\nz"
    assert opened.options == {"region": "eu"}
    assert found.open("s3+fast://").rest == ""


def test_an_existing_path_opens_safetensors(tmp_path, monkeypatch):
    found = Registry()
    found.add(plugin_of("safetensors"))
    assert found.open(str(tmp_path)).rest == str(tmp_path)
    assert found.open(tmp_path).rest == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert found.open("~/model").rest == str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert found.open("model").rest == "model"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone")
    assert found.open(dangling).rest == str(dangling)  # the source says what is wrong with it


@pytest.mark.parametrize("path", ["no/such/folder", Path("no/such/folder"), "Qwen/Qwen3-8B"])
def test_a_path_that_is_not_there_is_named(path):
    found = Registry()
    found.add(plugin_of("safetensors"))
    found.add(plugin_of("hub"))
    with pytest.raises(SourceError) as caught:
        found.open(path)
    assert f"no such file or folder: {path}" in str(caught.value)
    assert "hub, safetensors" in str(caught.value)


def test_a_path_that_cannot_be_looked_for_is_named():
    with pytest.raises(SourceError) as caught:
        Registry().open("n" * 300)
    assert str(caught.value) == f"not a usable path: {'n' * 300}: File name too long"


def test_a_source_is_returned_as_it_is():
    source = Plain("x")
    assert streamer.open_source(source) is source


def test_an_object_goes_to_the_source_that_accepts_it():
    found = Registry()
    found.add(plugin_of("dict", accepts=lambda value: isinstance(value, dict)))
    found.add(plugin_of("list", accepts=lambda value: isinstance(value, list)))
    found.add(plugin_of("shy"))
    value = {"w": torch.zeros(1)}
    assert found.open(value, cast="bf16").rest is value
    assert found.open(value, cast="bf16").options == {"cast": "bf16"}
    assert found.open([1]).rest == [1]
    with pytest.raises(SourceError) as caught:
        found.open(5)
    assert "no source accepts a builtins.int" in str(caught.value)
    assert "dict, list, shy" in str(caught.value)


def test_scheme_chooses_by_hand():
    found = Registry()
    found.add(plugin_of("one", accepts=lambda value: True))
    found.add(plugin_of("two", accepts=lambda value: True))
    value = object()
    assert found.open(value, scheme="two").rest is value
    assert found.open("some text", scheme="one").rest == "some text"
    assert found.open(Plain("inner"), scheme="one").rest.rest == "inner"
    with pytest.raises(PluginError, match="no source is registered for three://"):
        found.open(value, scheme="three")


def test_a_third_party_wins_over_a_built_in():
    found = Registry()
    found.add(plugin_of("module", accepts=lambda value: True), "module", "streamer")
    found.add(plugin_of("mine", accepts=lambda value: isinstance(value, list)), "mine", "acme")
    assert found.open({"a": 1}).rest == {"a": 1}
    entry, _ = found._choose([1], None)
    assert entry.scheme == "mine"
    entry, _ = found._choose({}, None)
    assert entry.scheme == "module"


def test_two_third_parties_that_claim_the_same_are_named():
    found = Registry()
    found.add(plugin_of("built", accepts=lambda value: True), "built", "streamer")
    found.add(plugin_of("mine", accepts=lambda value: True), "mine", "acme-weights")
    found.add(plugin_of("yours", accepts=lambda value: True), "yours", "zeta-tools")
    with pytest.raises(PluginError) as caught:
        found.open([1])
    assert str(caught.value) == (
        "mine (acme-weights) and yours (zeta-tools) both accept a builtins.list: choose one with "
        "scheme="
    )
    assert found.open([1], scheme="yours").rest == [1]


@pytest.mark.parametrize("error", [AttributeError("no foo"), SystemExit("no foo")])
def test_a_claim_that_raises_is_none_and_names_its_plugin(caplog, error):
    """Case 41: a third party's bug is logged, and the built-in sources go on."""
    found = Registry()

    def accepts(value):
        raise error

    found.add(plugin_of("mine", accepts=accepts), "mine", "acme-weights")
    with pytest.raises(SourceError, match="no source accepts a"):
        found.open([1])
    found.add(plugin_of("built", accepts=lambda value: True), "built", "streamer")
    caplog.clear()
    assert found.open([1]).rest == [1]
    assert caplog.messages == [
        "plugin mine (acme-weights) failed to say whether mine accepts a list: "
        f"{type(error).__name__}: no foo"
    ]
    assert found.open([1], scheme="mine").rest == [1]


def test_a_claim_of_ours_that_raises_is_an_error():
    """It is the object that does not answer: that must not look as if nobody wanted it."""
    found = Registry()
    found.add(plugin_of("built", accepts=lambda value: value.items), "built", "streamer")
    with pytest.raises(PluginError, match=r"built \(streamer\) failed .*: AttributeError: 'list'"):
        found.open([1])


def test_options_a_source_does_not_take_are_refused():
    def factory(rest, *, cast=None):
        return Plain(rest, cast=cast)

    found = Registry()
    found.add(plugin_of("strict", factory))
    assert found.open("strict://x", cast="bf16").options == {"cast": "bf16"}
    with pytest.raises(UsageError) as caught:
        found.open("strict://x", cats="bf16")
    assert "source strict does not take these options" in str(caught.value)
    assert "cats" in str(caught.value)
    assert str(caught.value).endswith("; it takes cast")


def test_what_options_a_source_takes():
    def many(rest, first, *rests, second=1, **others):
        raise AssertionError

    found = Registry()
    found.add(plugin_of("plain"))
    found.add(plugin_of("many", many))
    found.add(plugin_of("mute", dict))
    assert found.options_of("many://x") == ["first", "second"]
    assert found.options_of("mute://x") == []
    assert found.options_of(Plain("open")) == []


def test_the_options_of_a_source_of_ours_are_not_swallowed():
    with pytest.raises(UsageError):
        streamer.open_source(Plain("x"), cast="bf16")


def test_a_type_error_inside_a_factory_is_not_taken_for_a_wrong_option():
    def factory(rest):
        raise SourceError(f"cannot read {rest}")

    found = Registry()
    found.add(plugin_of("bad", factory))
    with pytest.raises(SourceError, match="cannot read x"):
        found.open("bad://x")


@pytest.mark.parametrize(
    "error", [ImportError("no transformers"), TypeError("odd"), KeyError("k"), SystemExit(4)]
)
def test_a_factory_that_breaks_names_its_plugin(error):
    """Heavy libraries are imported in the factory: a missing one shows up here."""

    def factory(rest):
        raise error

    found = Registry()
    found.add(plugin_of("bad", factory), "bad", "acme-weights")
    with pytest.raises(PluginError) as caught:
        found.open("bad://x")
    assert "plugin bad (acme-weights)" in str(caught.value)
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_factory_that_returns_something_else_is_named():
    found = Registry()
    found.add(plugin_of("odd", lambda rest: {"w": 1}), "odd", "acme")
    with pytest.raises(PluginError) as caught:
        found.open("odd://x")
    assert str(caught.value) == (
        "plugin odd (acme): the factory of odd:// returned a dict, not a WeightSource"
    )


# Events.


def observer(sink, error=None):
    class Observer:
        @hookimpl
        def streamer_on_event(self, event):
            sink.append(event)
            if error is not None:
                raise error

    return Observer()


def test_every_plugin_hears_of_an_event_and_errors_are_collected():
    found = Registry()
    first, second, third = [], [], []
    problem = RuntimeError("observer broke")
    found.add(observer(first), "first")
    found.add(observer(second, problem), "second")
    found.add(observer(third), "third")
    found.add(plugin_of("silent"))
    assert found.call_on_event(EVENT) == [problem]
    assert first == second == third == [EVENT]


def test_nobody_listens():
    assert Registry().call_on_event(EVENT) == []
