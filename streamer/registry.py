"""Find plugins, and open a source that one of them registers: from a URI, a path or an object."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamer.exceptions import PluginError, SourceError, UsageError, one_line
from streamer.hookspecs import PROJECT
from streamer.plugins import BrokenPlugin, SourceEntry, ask, new_manager
from streamer.source import WeightSource

ENTRY_POINT_GROUP = "streamer"
IN_PROCESS = "in-process"
PATH_SCHEME = "safetensors"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass
class Registry:
    """The sources of a set of plugins.

    Plugins are taken one by one: one that cannot be imported, has an unknown hook argument, or
    fails while registering is listed in ``broken`` and takes nothing with it.
    """

    entries: dict[str, SourceEntry] = field(default_factory=dict)
    broken: list[BrokenPlugin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._manager = new_manager()
        self._distributions: dict[str, str] = {}

    def load_entry_points(
        self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
    ) -> None:
        """Load every plugin of the group, built-in ones first, then by name."""
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        found = [(_distribution(point), point) for point in entry_points]
        for distribution, point in sorted(
            found, key=lambda pair: (pair[0] != PROJECT, pair[1].name, pair[0])
        ):
            try:
                plugin = point.load()
            except (Exception, SystemExit) as error:
                self._set_aside(point.name, distribution, error)
            else:
                self._add_or_set_aside(plugin, point.name, distribution)

    def add(
        self,
        plugin: object,
        name: str | None = None,
        distribution: str = IN_PROCESS,
        *,
        replace: bool = False,
    ) -> None:
        """Register a plugin of this process: a module, or an instance whose methods are hooks.

        ``name`` is the module's or the class's, if not given. ``replace`` puts it in the place of
        the in-process plugin of that name, if there is one; sources that are open stay as they are.
        Raises `PluginError`, and changes nothing, if it is broken or its name or one of its schemes
        is taken.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        where = f"plugin {name} ({distribution})"
        if inspect.isclass(plugin):
            raise PluginError(f"{where}: it is a class: register a module or an instance of it")
        holder = self._distributions.get(name)
        if holder is not None and not (replace and holder == distribution == IN_PROCESS):
            remedy = "pass replace=True to exchange it" if holder == IN_PROCESS else "rename it"
            raise PluginError(
                f"{where}: a plugin of this name is registered already, by {holder}: {remedy}"
            )
        other = self._manager.get_name(plugin)
        if other is not None and other != name:
            raise PluginError(
                f"{where}: it is registered already, as {other} ({self._distributions[other]})"
            )
        others = {scheme: entry for scheme, entry in self.entries.items() if entry.plugin != name}
        entries = ask(plugin, name, distribution, others)
        if holder is not None:
            self._manager.unregister(name=name)
        self._manager.register(plugin, name=name)
        self._distributions[name] = distribution
        self.entries = {**others, **entries}

    def call_on_event(self, event: object) -> list[Exception]:
        """Give ``event`` to every plugin in turn; return what they raised."""
        errors: list[Exception] = []
        implementations = self._manager.hook.streamer_on_event.get_hookimpls()
        for plugin in dict.fromkeys(each.plugin for each in implementations):
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            try:
                self._manager.subset_hook_caller("streamer_on_event", others)(event=event)
            except Exception as error:
                errors.append(error)
        return errors

    def open(self, source: object, *, scheme: str | None = None, **options: Any) -> WeightSource:
        """Open a source; see `streamer.open_source`."""
        entry, rest = self._choose(source, scheme)
        if entry is None:
            assert isinstance(source, WeightSource)
            if options:
                raise UsageError(
                    f"the source is open already: it takes no option {next(iter(options))}"
                )
            return source
        return entry.open(rest, options)

    def options_of(self, source: object) -> list[str]:
        """What options the source takes that `open` would choose. Raises as that does."""
        entry, _ = self._choose(source, None)
        return [] if entry is None else entry.options

    def _choose(self, source: object, scheme: str | None) -> tuple[SourceEntry | None, object]:
        if scheme is not None:
            return self._by_scheme(scheme), source
        if isinstance(source, WeightSource):
            return None, source
        if isinstance(source, str) and (match := _URI.fullmatch(source)):
            return self._by_scheme(match[1].lower()), match[2]
        if isinstance(source, (str, os.PathLike)):
            try:
                if not source:
                    raise SourceError("the source is empty: give a path, or scheme://...")
                path = Path(source).expanduser()
                absent = not path.exists() and not path.is_symlink()
            except RuntimeError as error:  # whose home that is nobody knows
                raise SourceError(f"not a usable path: {source}: {error}") from error
            except OSError as error:  # too long, or in a folder that may not be looked into
                raise SourceError(f"not a usable path: {source}: {error.strerror}") from error
            if absent:
                raise SourceError(
                    f"no such file or folder: {path} (a path, or scheme://... with one of "
                    f"{', '.join(sorted(self.entries))})"
                )
            return self._by_scheme(PATH_SCHEME), str(path)
        return self._claimed(source), source

    def _by_scheme(self, scheme: str) -> SourceEntry:
        if scheme in self.entries:
            return self.entries[scheme]
        known = ", ".join(sorted(self.entries)) or "none"
        broken = "".join(
            f"; plugin {item.plugin} ({item.distribution}) failed to load: {item.error}"
            for item in self.broken
        )
        raise PluginError(f"no source is registered for {scheme}://; installed: {known}{broken}")

    def _claimed(self, source: object) -> SourceEntry:
        claims = [entry for entry in self.entries.values() if entry.claims(source)]
        claims = [entry for entry in claims if not entry.built_in] or claims
        if len(claims) == 1:
            return claims[0]
        kind = f"{type(source).__module__}.{type(source).__qualname__}"
        if not claims:
            raise SourceError(
                f"no source accepts a {kind}; pass a path, a URI, a WeightSource, or choose one "
                f"with scheme= ({', '.join(sorted(self.entries))})"
            )
        names = " and ".join(f"{entry.scheme} ({entry.distribution})" for entry in claims)
        raise PluginError(f"{names} both accept a {kind}: choose one with scheme=")

    def _add_or_set_aside(self, plugin: object, name: str, distribution: str) -> None:
        try:
            self.add(plugin, name, distribution)
        except PluginError as error:
            self._set_aside(name, distribution, error)

    def _set_aside(self, name: str, distribution: str, error: BaseException) -> None:
        text = str(error).removeprefix(f"plugin {name} ({distribution}): ")
        if not isinstance(error, PluginError):
            text = f"{type(error).__name__}: {one_line(error)}"
        self.broken.append(BrokenPlugin(name, distribution, text))


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown distribution"


_default: Registry | None = None
_changing = threading.RLock()


def default_registry() -> Registry:
    """The registry of this process; entry points are read at the first call, on any thread."""
    global _default
    with _changing:
        if _default is None:
            _default = Registry()  # for a plugin that registers another one while it is loaded
            try:
                _default.load_entry_points()
            except BaseException:
                _default = None
                raise
        return _default


def open_source(source: object, *, scheme: str | None = None, **options: Any) -> WeightSource:
    """Open a source of weights.

    ``source`` is ``"scheme://rest"``, an existing path (a safetensors file or folder), a
    `WeightSource` (returned as it is), or an object that a registered source accepts.
    ``scheme`` chooses a source by hand; ``options`` go to its factory.

    Raises `SourceError` if it cannot be opened, `PluginError` if no source, or more than one,
    claims it, `UsageError` for options it does not take.
    """
    return default_registry().open(source, scheme=scheme, **options)


def register_plugin(plugin: object, name: str | None = None, *, replace: bool = False) -> None:
    """Register a plugin without packaging it, as in a notebook.

    ``plugin`` is a module, or an instance whose methods are hooks; with ``replace`` the cell that
    registers it can be run again. Any thread may call it. See `Registry.add`.
    """
    with _changing:
        default_registry().add(plugin, name, replace=replace)
