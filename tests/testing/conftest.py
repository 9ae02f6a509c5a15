"""The kit of the tests of `SourceSuite`, and a distribution that is really installed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kit_acme
from streamer import WeightSource, hookimpl

MODULE = "acme_suite"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution that registers ``acme-suite`` for a class."""
    site = tmp_path / "site"
    info = site / "acme_suite-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-suite\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[streamer]\nacme-suite = {MODULE}\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()

    def install(kind: type[WeightSource]) -> None:
        module = ModuleType(MODULE)

        @hookimpl
        def streamer_register_sources(register: Any) -> None:
            register("acme-suite", kind, summary="weights of acme")

        module.streamer_register_sources = streamer_register_sources  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, MODULE, module)

    return install


@pytest.fixture
def fails_only(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Install a wrong source: these checks fail, the first with a line like this, and no other."""
    monkeypatch.setattr("streamer.testing.usage.PATIENCE", 0.2)

    def check(kind: type[WeightSource], checks: tuple[str, ...], message: str) -> None:
        install(kind)
        failed = kit_acme.outcome(kit_acme.suite_of(kind), tmp_path)
        for file in getattr(kind, "left_open", ()):
            os.close(file)
        assert sorted(failed) == sorted(checks), failed
        first = failed[checks[0]]
        assert first.isprintable(), first
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(first)

    return check
