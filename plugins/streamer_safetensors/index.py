"""The index of a sharded checkpoint: which tensor is in which file."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

from streamer.exceptions import SourceError
from streamer_safetensors.untrusted import likely_kind, parse_json, shown

_WEIGHTS = ".safetensors"


def parse_index(raw: bytes, index: object) -> dict[PurePosixPath, set[str]]:
    """The tensors of each shard that an index names, sorted by shard.

    A shard is a plain path below the folder of the index: no absolute one, no ``..``. Raises
    `SourceError`, in which ``index`` names the file, if the index is not sound.
    """
    tensors_of: defaultdict[str, list[str]] = defaultdict(list)
    for tensor, entry in _weight_map(raw, index).items():
        if not isinstance(entry, str) or not entry:
            raise SourceError(
                f"{shown(index)} gives {shown(tensor)} to no file; download or save it again"
            )
        tensors_of[entry].append(tensor)
    wanted: defaultdict[PurePosixPath, set[str]] = defaultdict(set)
    for entry, tensors in tensors_of.items():
        wanted[_shard(index, entry, tensors[0])].update(tensors)
    return {shard: wanted[shard] for shard in sorted(wanted)}


def _weight_map(raw: bytes, index: object) -> dict[str, Any]:
    try:
        content = parse_json(raw)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no weight_map of tensor names to files")
    except ValueError as error:
        kind = None if raw[:64].lstrip().startswith(b"{") else likely_kind(raw[:64])
        reason = f"it is {kind}" if kind else f"{error}; download or save it again"
        raise SourceError(f"{shown(index)} is not an index of shards: {reason}") from error
    return weight_map


def _shard(index: object, entry: str, tensor: str) -> PurePosixPath:
    shard = PurePosixPath(entry)
    if not entry.isprintable() or shard.is_absolute() or ".." in shard.parts:
        raise SourceError(not_inside(index, entry, tensor))
    if shard.suffix != _WEIGHTS:
        raise SourceError(
            f"{shown(index)} gives {shown(tensor)} to {shown(entry)}, which is no {_WEIGHTS} file: "
            "convert the checkpoint to safetensors, with an index of its own"
        )
    return shard


def not_inside(index: object, entry: object, tensor: str) -> str:
    """The message that refuses an entry which leads out of the folder of its index."""
    return (
        f"{shown(index)} gives {shown(tensor)} to {shown(entry)}, which is no plain "
        "path inside its own folder: refused; do not trust this checkpoint"
    )
