"""Which files make up a checkpoint, and which tensors come from which of them."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from streamer.exceptions import SourceError
from streamer_safetensors.file import OpenFile, StoredTensor, broken_link
from streamer_safetensors.untrusted import MAX_JSON_SIZE, likely_kind, parse_json, shown

_log = logging.getLogger("streamer")

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_ADAPTER = "adapter_model"
_CONSOLIDATED = "consolidated"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".distcp")
_NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
_MERGE = "merge it into its base model first (PEFT: merge_and_unload(), then save_pretrained)"


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint, in the order to read them.

    ``wanted`` are the tensors to take from each; None where there is no index, which takes all.
    """

    files: Sequence[Path]
    index: Path | None = None
    wanted: Mapping[Path, set[str]] | None = None

    def select(self, file: Path, tensors: list[StoredTensor]) -> list[StoredTensor]:
        """Those of a file's tensors that the checkpoint takes from it.

        Raises `SourceError` if one that the index gives to the file is not there.
        """
        if self.wanted is None or self.index is None:
            return tensors
        wanted = self.wanted[file]
        chosen = [tensor for tensor in tensors if tensor.spec.name in wanted]
        absent = sorted(wanted.difference(tensor.spec.name for tensor in chosen))
        if absent:
            raise SourceError(
                f"{shown(file)} does not hold {shown(absent[0])}{_and_more(absent)}, which "
                f"{shown(self.index)} gives to it: the two are of different checkpoints; download "
                "or save both again"
            )
        return chosen


def find_layout(where: str | os.PathLike[str]) -> Layout:
    """The layout of a file, a folder or an index; ``~`` is expanded. Reads no weight file.

    Raises `SourceError` if there is none there, or if shards are missing.
    """
    try:
        if not os.fspath(where):
            raise SourceError("no path given: name a .safetensors file or a checkpoint folder")
        path = Path(where).expanduser().absolute()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SourceError(f"not a usable path: {shown(repr(where))}: {shown(error)}") from error
    if os.path.isdir(path):
        return _of_folder(path)
    if path.name.startswith(_ADAPTER):
        raise SourceError(f"{shown(path)} is a LoRA adapter, not a model: {_MERGE}")
    return _of_index(path) if path.suffix == ".json" else Layout([path])


def _of_folder(folder: Path) -> Layout:
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise SourceError(f"cannot list {shown(folder)}: {error.strerror}") from error
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    models = [name for name in weights if not name.startswith(_ADAPTER)]
    index = _choose_index(folder, names)
    if index is not None:
        layout = _of_index(index)
    elif models:
        # Mistral's own format, beside the same weights under their Hugging Face names.
        converted = [name for name in models if not name.startswith(_CONSOLIDATED)]
        _check_numbering(folder, converted or models)
        layout = Layout([folder / name for name in converted or models])
    else:
        raise SourceError(_why_nothing(folder, names, adapters=weights))
    read = set(layout.files)
    ignored = [
        name for name in weights if folder / name not in read and not name.startswith(_CONSOLIDATED)
    ]
    if ignored:
        _log.warning("%s: not part of the model, ignored: %s", shown(folder), _listed(ignored))
    return layout


def _choose_index(folder: Path, names: list[str]) -> Path | None:
    found = [name for name in names if name.endswith(_INDEX) and not name.startswith(_ADAPTER)]
    if f"model{_INDEX}" in found:
        return folder / f"model{_INDEX}"
    if len(found) > 1:
        raise SourceError(
            f"{shown(folder)} has several indexes, {_listed(found)}: name one of them as the source"
        )
    return folder / found[0] if found else None


def _check_numbering(folder: Path, names: list[str]) -> None:
    """Refuse shards numbered ``i of n`` that are not ``n``: without an index nothing else tells."""
    shards: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            shards[match[1], match[3]] += 1
    for (stem, total), count in shards.items():
        if count != int(total):
            raise SourceError(
                f"{shown(folder)} has {count} of the {int(total)} shards "
                f"{shown(stem)}-*-of-{total}{_WEIGHTS}, and no index: download or copy all of them"
            )


def _why_nothing(folder: Path, names: list[str], adapters: list[str]) -> str:
    if adapters:
        return f"{shown(folder)} holds only a LoRA adapter ({_listed(adapters)}): {_MERGE}"
    nothing = f"{shown(folder)} holds no *{_WEIGHTS} file"
    subfolders = sorted({path.parent.name for path in folder.glob(f"*/*{_WEIGHTS}")})
    if subfolders:
        return f"{nothing}; its subfolders do, name one of them: {_listed(subfolders)}"
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if others:
        return (
            f"{nothing}, only PyTorch files ({_listed(others)}): convert them (load the model "
            "with transformers, then save_pretrained writes safetensors)"
        )
    return f"{nothing}; it is empty" if not names else f"{nothing}, only {_listed(names)}"


def _of_index(index: Path) -> Layout:
    tensors_of: defaultdict[str, list[str]] = defaultdict(list)
    for tensor, entry in _read_weight_map(index).items():
        if not isinstance(entry, str) or not entry:
            raise SourceError(
                f"{shown(index)} gives {shown(tensor)} to no file; download or save it again"
            )
        tensors_of[entry].append(tensor)
    wanted: defaultdict[Path, set[str]] = defaultdict(set)
    for entry, tensors in tensors_of.items():
        wanted[_shard(index, entry, tensors[0])].update(tensors)
    files = sorted(wanted)
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(files)} shards that {shown(index)} names are missing: "
            f"{', '.join(map(_described_missing, missing))}; download or copy them"
        )
    return Layout(files, index, wanted)


def _read_weight_map(index: Path) -> dict[str, Any]:
    with closing(OpenFile(index)) as file:
        if file.size > MAX_JSON_SIZE:
            raise SourceError(
                f"{file} is {file.size} bytes long, and {MAX_JSON_SIZE} are allowed for an index"
            )
        raw = file.read(0, file.size)
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


def _shard(index: Path, entry: str, tensor: str) -> Path:
    """The file that an entry names, in the folder of the index or below.

    The file itself may be a link to anywhere, as in the Hugging Face cache; a folder on the way to
    it may not lead outside.
    """
    name = PurePosixPath(entry)
    shard = index.parent / name
    if (
        not entry.isprintable()
        or name.is_absolute()
        or ".." in name.parts
        or not _is_inside(shard.parent, index.parent)
    ):
        raise SourceError(
            f"{shown(index)} gives {shown(tensor)} to {shown(entry)}, which is no plain "
            "path inside its own folder: refused; do not trust this checkpoint"
        )
    if name.suffix != _WEIGHTS:
        raise SourceError(
            f"{shown(index)} gives {shown(tensor)} to {shown(entry)}, which is no {_WEIGHTS} file: "
            "convert the checkpoint to safetensors, with an index of its own"
        )
    return shard


def _is_inside(inner: Path, outer: Path) -> bool:
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))


def _described_missing(file: Path) -> str:
    target = broken_link(file)
    return shown(file.name) + (f" (a link to {target}, which leads to no file)" if target else "")


def _listed(names: Iterable[str]) -> str:
    return shown(", ".join(names))


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
