"""Choosing a source, and telling plugins of events."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamer
from kit_plugins import EVENT, Plain, plugin_of
from streamer import (
    PluginError,
    SourceError,
    UsageError,
    hookimpl,
)
from streamer.registry import Registry

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
    assert "(give a path, or scheme://...; see: streamer sources)" in str(caught.value)


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
    assert "no source accepts an int; pass a module, a state dict, a path" in str(caught.value)
    assert "dict, list, shy" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "no source accepts None; pass a module, a state dict, a path, "),
        (Registry, "no source accepts the class Registry; pass an instance of it, a path, "),
        (Registry(), "no source accepts a streamer.registry.Registry; pass a module, "),
    ],
)
def test_what_no_source_accepts_is_told_with_what_some_do(source, said):
    with pytest.raises(SourceError) as caught:
        Registry().open(source)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("Qwen/Qwen3-0.6B", "on the Hub it is hf://Qwen/Qwen3-0.6B)"),
        ("/Qwen/Qwen3-0.6B", "see: streamer sources)"),
        ("no/such/folder", "see: streamer sources)"),
    ],
)
def test_a_name_of_the_hub_is_no_path(path, hint):
    found = Registry()
    found.add(plugin_of("hf"))
    with pytest.raises(SourceError, match="no such file or folder") as caught:
        found.open(path)
    assert str(caught.value).endswith(hint)


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
        "mine (acme-weights) and yours (zeta-tools) both accept a list: choose one with scheme="
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
