"""Plugins that are registered in this process, as in a notebook, and registered again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

import streamer
from streamer import PluginError, TensorSpec, WeightSource, hookimpl, registry
from streamer.events import SyncStarted
from streamer.registry import Registry

EVENT = SyncStarted(1, 4, 1, ("http://host:1",))


class Numbers(WeightSource):
    """One tensor of ``rest`` numbers."""

    def __init__(self, rest: Any) -> None:
        self.rest = rest

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("n", torch.float32, (int(self.rest),))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "n", torch.arange(float(self.rest))


def cell(*schemes: str, factory: Callable[..., Any] | None = Numbers) -> object:
    """What a notebook's cell defines each time that it is run: always a new class."""

    class Notebook:
        def __init__(self) -> None:
            self.events: list[object] = []

        @hookimpl
        def streamer_register_sources(self, register: Any) -> None:
            for scheme in schemes:
                register(scheme, factory)

        @hookimpl
        def streamer_on_event(self, event: object) -> None:
            self.events.append(event)

    return Notebook()


class Point:
    """An entry point that does ``act`` when it is loaded."""

    name, dist = "slow", None

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def load(self) -> object:
        self._act()
        return cell("slow")


def load_only(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """A process that has opened nothing yet, and has one plugin installed."""
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [Point(act)])


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A process that has opened nothing yet."""
    monkeypatch.setattr(registry, "_default", None)
    return registry.default_registry()


def test_a_notebook_registers_a_source_and_opens_it(own: Registry) -> None:
    streamer.register_plugin(cell("numbers"))
    source = streamer.open_source("numbers://3")
    assert [spec.shape for spec in source.specs()] == [(3,)]
    assert dict(source)["n"].tolist() == [0.0, 1.0, 2.0]
    assert {"safetensors", "module"} <= own.entries.keys()


def test_a_module_is_registered_as_it_is(own: Registry) -> None:
    module = ModuleType("in_a_notebook")

    @hookimpl
    def streamer_register_sources(register: Any) -> None:
        register("numbers", Numbers)

    module.streamer_register_sources = streamer_register_sources  # type: ignore[attr-defined]
    streamer.register_plugin(module)
    assert own.entries["numbers"].plugin == "in_a_notebook"
    assert streamer.open_source("numbers://2").specs()


def test_a_cell_can_be_run_again(own: Registry) -> None:
    """The schemes, the claims and the observer of the last time are gone."""
    first, second = cell("numbers", "gone"), cell("numbers", factory=lambda rest: Numbers(7))
    streamer.register_plugin(first, replace=True)
    opened = streamer.open_source("numbers://3")
    streamer.register_plugin(second, replace=True)
    assert streamer.open_source("numbers://3").specs()[0].shape == (7,)
    assert opened.specs()[0].shape == (3,)
    with pytest.raises(PluginError, match="no source is registered for gone://"):
        streamer.open_source("gone://x")
    assert own.call_on_event(EVENT) == []
    assert first.events == []  # type: ignore[attr-defined]
    assert second.events == [EVENT]  # type: ignore[attr-defined]
    streamer.register_plugin(second, replace=True)
    assert streamer.open_source("numbers://3").specs()[0].shape == (7,)


def test_without_replace_the_first_stays_and_the_remedy_is_told(own: Registry) -> None:
    streamer.register_plugin(cell("numbers"))
    with pytest.raises(PluginError) as caught:
        streamer.register_plugin(cell("others"))
    assert str(caught.value) == (
        "plugin Notebook (in-process): a plugin of this name is registered already, by in-process: "
        "pass replace=True to exchange it"
    )
    assert streamer.open_source("numbers://3").specs()[0].shape == (3,)
    assert "others" not in own.entries


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (cell("numbers", "safetensors"), "scheme safetensors:// is taken by plugin safetensors"),
        (cell("numbers", "numbers"), r"scheme numbers:// is taken by plugin Notebook \(in-process"),
        (cell("NUMBERS"), "scheme 'NUMBERS' must match"),
        (cell("numbers", factory=None), "the factory of numbers:// must be callable"),
        (object(), "it implements no hook"),
    ],
    ids=["taken", "twice", "malformed", "no-factory", "no-hook"],
)
def test_a_broken_replacement_changes_nothing(own: Registry, again: object, message: str) -> None:
    first = cell("numbers")
    streamer.register_plugin(first)
    with pytest.raises(PluginError, match=message):
        streamer.register_plugin(again, "Notebook", replace=True)
    assert streamer.open_source("numbers://3").specs()[0].shape == (3,)
    assert own.call_on_event(EVENT) == []
    assert first.events == [EVENT]  # type: ignore[attr-defined]


def test_an_installed_plugin_is_not_replaced(own: Registry) -> None:
    with pytest.raises(PluginError) as caught:
        streamer.register_plugin(cell("numbers"), "module", replace=True)
    assert str(caught.value) == (
        "plugin module (in-process): a plugin of this name is registered already, by streamer: "
        "rename it"
    )
    assert streamer.open_source({"w": torch.zeros(1)}).specs()


def test_a_plugin_that_comes_while_others_are_loaded_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread registers it while the first one still reads the entry points."""
    other = threading.Thread(target=lambda: streamer.register_plugin(cell("numbers"), "other"))

    def load() -> None:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.3)  # which it waits for, if all is well

    load_only(monkeypatch, load)
    found = registry.default_registry()
    other.join()
    assert registry.default_registry() is found
    assert found.entries.keys() == {"slow", "numbers"}


def test_a_plugin_may_register_another_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_only(monkeypatch, lambda: streamer.register_plugin(cell("numbers"), "other", replace=True))
    assert registry.default_registry().entries.keys() == {"slow", "numbers"}


def test_loading_that_is_interrupted_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = [KeyboardInterrupt()]

    def load() -> None:
        if interrupts:
            raise interrupts.pop()

    load_only(monkeypatch, load)
    with pytest.raises(KeyboardInterrupt):
        registry.default_registry()
    assert registry.default_registry().entries.keys() == {"slow"}
