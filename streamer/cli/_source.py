"""The source that a command is given, opened and changed as its options say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from streamer.defaults import CastDtype
from streamer.exceptions import UsageError

if TYPE_CHECKING:
    from streamer.source import WeightSource


@contextlib.contextmanager
def opened(
    source: str,
    options: Sequence[str] | None,
    *,
    no_cache: bool = False,
    select: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    rename: Sequence[str] | None = None,
    cast: CastDtype | None = None,
) -> Iterator[WeightSource]:
    """``source`` opened with ``KEY=VALUE`` options and changed, and closed after the block."""
    from streamer import transforms
    from streamer.registry import open_source
    from streamer.source import close_source

    renames = [_parse_rename(option) for option in rename or ()]
    parsed = _parse_options([*(options or ()), *_no_cache(source, no_cache)], source)
    with contextlib.ExitStack() as stack:
        changed = open_source(source, **parsed)
        stack.callback(close_source, changed)
        if select:
            changed = transforms.select(changed, *select)
        if exclude:
            changed = transforms.exclude(changed, *exclude)
        for old, new in renames:
            changed = transforms.rename(changed, old, new)
        if cast is not None:
            changed = transforms.cast(changed, cast.value)
        yield changed


def _parse_rename(option: str) -> tuple[str, str]:
    """Old and new of ``OLD=NEW``. An expression may hold a ``=``, a new name does not."""
    old, equals, new = option.rpartition("=")
    if not equals or not old:
        raise UsageError(rf"--rename: {option!r} is not OLD=NEW, as in '^model\.=language_model.'")
    return old, new


def _no_cache(source: str, wanted: bool) -> list[str]:
    """The option of the source that ``--no-cache`` stands for."""
    from streamer.registry import default_registry

    if wanted and "no_cache" not in default_registry().options_of(source):
        raise UsageError("--no-cache: this source has no cache; leave it out")
    return ["no_cache=true"] if wanted else []


def _parse_options(options: Sequence[str], source: str) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        # `source` is the parameter of open_source itself.
        if not equals or not key.isidentifier() or key == "source":
            from streamer.registry import default_registry

            known = default_registry().options_of(source)
            hint = f": this source takes {', '.join(known)}" if known else ""
            raise UsageError(f"--option: {option!r} is not KEY=VALUE{hint}")
        if key in parsed:
            raise UsageError(f"--option: {key} is given twice")
        parsed[key] = value
    return parsed
