"""What was meant by an option that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_INSTEAD = {
    "timeout": "timeouts=streamer.Timeouts(total=...)",
    "connect_timeout": "timeouts=streamer.Timeouts(connect=...)",
    "progress_timeout": "timeouts=streamer.Timeouts(progress=...)",
    "api_key": 'headers={"Authorization": "Bearer KEY"}',
    "header": 'headers={"NAME": "VALUE"}',
    "per_tensor": "packed=False",
    "trust_env_proxies": "trust_env=True",
    "weight_version": "session.push(source, weight_version=...)",
    "force": "session.push(source, force=True)",
    "select": "streamer.select(source, ...)",
    "exclude": "streamer.exclude(source, ...)",
    "rename": "streamer.rename(source, ...)",
    "cast": "streamer.cast(source, ...)",
}
"""Options of the command line, or of one call, that are another thing in Python, or another call's.
"""


def unknown_options(unknown: Iterable[str], known: Sequence[str]) -> str:
    """The message about options that are not among ``known``: what to give in their place."""
    names = sorted(unknown)
    hints: list[str] = []
    for name in names:
        near = difflib.get_close_matches(name, known, 1)
        if name in _INSTEAD:
            hints.append(f"give {_INSTEAD[name]}")
        elif near:
            hints.append(f"did you mean {near[0]}?")
    hints.append(f"there are {', '.join(sorted(known))}")
    return f"there is no option {', '.join(names)}: {'; '.join(hints)}"
