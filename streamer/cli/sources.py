"""``streamer sources``: what can be pushed, and plugins that do not work."""

from __future__ import annotations

from streamer.cli._output import on_terminal, print_table
from streamer.cli._torch import import_torch


def sources() -> None:
    """List what can be pushed: the sources of all installed plugins.

    Example: streamer sources

    In a pipe a source is a line: scheme, summary, plugin, distribution, with
    tabs between. A broken plugin has ! for a scheme and its error for a summary.
    """
    import_torch()
    from streamer.registry import default_registry

    registry = default_registry()
    entries = [
        (entry.scheme, entry.summary, entry.plugin, entry.distribution)
        for _, entry in sorted(registry.entries.items())
    ]
    broken = [("!", item.error, item.plugin, item.distribution) for item in registry.broken]
    if not on_terminal():
        print_table((), entries + broken)
        return
    columns = ("scheme", "what", "plugin", "distribution")
    print_table(columns, [(f"{scheme}://", *rest) for scheme, *rest in entries])
    if broken:
        print("Broken plugins, which were set aside:")
        print_table(("error", *columns[2:]), [row[1:] for row in broken])
