"""One plugin: what it registers, asked so that whatever it does wrong is told as its own error."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from streamer import hookspecs
from streamer.exceptions import PluginError, StreamerError, UsageError, one_line
from streamer.hookspecs import PROJECT, SourceFactory
from streamer.source import WeightSource

log = logging.getLogger("streamer")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclass(frozen=True)
class SourceEntry:
    """One registered scheme."""

    scheme: str
    factory: SourceFactory
    accepts: Callable[[object], bool] | None
    summary: str
    plugin: str
    distribution: str

    @property
    def built_in(self) -> bool:
        """Whether it ships with streamer. A third party's claim to an object wins over these."""
        return self.distribution == PROJECT

    @property
    def options(self) -> list[str]:
        """What options its factory declares; none if it does not tell."""
        try:
            parameters = inspect.signature(self.factory).parameters.values()
        except (TypeError, ValueError):
            return []
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [item.name for item in list(parameters)[1:] if item.kind in named]

    def claims(self, source: object) -> bool:
        """Whether it accepts ``source``. A third party's that fails is logged, and is no claim."""
        try:
            return self.accepts is not None and bool(self.accepts(source))
        except (Exception, SystemExit) as error:
            text = (
                f"plugin {self.plugin} ({self.distribution}) failed to say whether {self.scheme} "
                f"accepts a {type(source).__qualname__}: {type(error).__name__}: {one_line(error)}"
            )
            if self.built_in:
                raise PluginError(text) from error
            log.warning("%s", text)
            return False

    def open(self, rest: object, options: Mapping[str, Any]) -> WeightSource:
        """What the factory makes of ``rest``. Raises as `streamer.open_source` does."""
        try:
            inspect.signature(self.factory).bind(rest, **options)
        except TypeError as error:
            raise UsageError(
                f"source {self.scheme} does not take these options: {error}; it takes "
                f"{', '.join(self.options) or 'none'}"
            ) from None
        except ValueError:  # it has no signature to be compared with
            pass
        try:
            opened = self.factory(rest, **options)
        except StreamerError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {self.plugin} ({self.distribution}) failed to open {self.scheme}://: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
        if not isinstance(opened, WeightSource):
            raise PluginError(
                f"plugin {self.plugin} ({self.distribution}): the factory of {self.scheme}:// "
                f"returned a {type(opened).__name__}, not a WeightSource"
            )
        return opened


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that was set aside, and why."""

    plugin: str
    distribution: str
    error: str


def ask(
    plugin: object, name: str, distribution: str, others: Mapping[str, SourceEntry]
) -> dict[str, SourceEntry]:
    """What ``plugin`` registers beside the ``others``, by scheme.

    On a manager of its own, so that a failure leaves nothing. Raises `PluginError` if it is broken,
    or one of its schemes is taken.
    """
    entries: dict[str, SourceEntry] = {}

    def register(
        scheme: str,
        factory: SourceFactory,
        *,
        accepts: Callable[[object], bool] | None = None,
        summary: str = "",
    ) -> None:
        if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
            raise PluginError(f"scheme {scheme!r:.100} must match {_SCHEME.pattern}")
        if not callable(factory):
            raise PluginError(
                f"the factory of {scheme}:// must be callable, as factory(rest, **options), "
                f"not {factory!r:.100}"
            )
        if accepts is not None and not callable(accepts):
            raise PluginError(
                f"accepts of {scheme}:// must be callable, as accepts(obj), not {accepts!r:.100}"
            )
        taken = entries.get(scheme) or others.get(scheme)
        if taken:
            raise PluginError(
                f"scheme {scheme}:// is taken by plugin {taken.plugin} ({taken.distribution}): "
                "choose another one, or uninstall that plugin"
            )
        entries[scheme] = SourceEntry(scheme, factory, accepts, summary, name, distribution)

    manager = new_manager()
    try:
        manager.register(plugin, name=name)
        if not manager.get_hookcallers(plugin):
            raise PluginError("it implements no hook: mark its functions with streamer.hookimpl")
        manager.check_pending()
        manager.hook.streamer_register_sources(register=register)
    except PluginError as error:
        raise PluginError(f"plugin {name} ({distribution}): {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name} ({distribution}): {type(error).__name__}: {one_line(error)}"
        ) from error
    return entries


def new_manager() -> pluggy.PluginManager:
    """A manager that knows our hooks, and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager
