"""Options of ``hf://``, and the choice between the two ways."""

from __future__ import annotations

import os

from huggingface_hub import constants

from streamer.exceptions import UsageError
from streamer.source import WeightSource
from streamer_huggingface.cache import Cache
from streamer_huggingface.cached import CachedSource
from streamer_huggingface.direct import DirectSource
from streamer_huggingface.hub import make_target
from streamer_huggingface.path import parse_path

_CONNECTIONS = 16
_DOWNLOADS = 1
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def open_source(
    rest: str,
    *,
    no_cache: bool | str,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    endpoint: str | None,
    connections: int | str | None,
    download_first: bool | str,
) -> WeightSource:
    """See `streamer_huggingface.open_hub`."""
    direct = _flag("no_cache", no_cache)
    first = _flag("download_first", download_first)
    if direct and (first or cache_dir is not None):
        raise UsageError(
            "no_cache keeps nothing: it goes with neither cache_dir nor download_first"
        )
    if token in ("true", "false"):
        token = token == "true"
    target = make_target(parse_path(rest), endpoint, token)
    if not direct:
        at_once = _count("connections", connections, _DOWNLOADS)
        cache = Cache(target.path, cache_dir)
        return CachedSource(target, cache, at_once, download_first=first)
    at_once = _count("connections", connections, _CONNECTIONS)
    if constants.HF_HUB_OFFLINE:
        raise target.error("HF_HUB_OFFLINE is set, and no_cache reads from the Hub", "unset one")
    return DirectSource(target, at_once)


def _flag(name: str, value: bool | str) -> bool:
    flag = _WORDS.get(str(value).lower())
    if flag is None:
        raise UsageError(f"{name} is true or false, not {value!r}")
    return flag


def _count(name: str, value: int | str | None, default: int) -> int:
    text = str(default if value is None else value)
    if not text.isdecimal() or not int(text):
        raise UsageError(f"{name} is a number from 1 on, not {value!r}")
    return int(text)
