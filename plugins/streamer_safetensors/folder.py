"""Which files make up a checkpoint, and which tensors come from which of them."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from streamer_module.structure import is_of_adapter

from streamer.exceptions import SourceError
from streamer_safetensors.file import OpenFile, StoredTensor, broken_link
from streamer_safetensors.index import not_inside, parse_index
from streamer_safetensors.untrusted import MAX_JSON_SIZE, shown

_log = logging.getLogger("streamer")

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_ADAPTER = "adapter_model"
_CONSOLIDATED = "consolidated"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".distcp")
_NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
_MERGE = "push it with its base model, which merges them on the way: peft://ADAPTER?base=CHECKPOINT"


File = TypeVar("File")


@dataclass(frozen=True)
class Layout(Generic[File]):
    """The files of a checkpoint, in the order to read them.

    ``wanted`` are the tensors to take from each; None where there is no index, which takes all.
    Files are paths, or whatever else names them where they are.
    """

    files: Sequence[File]
    index: object = None
    wanted: Mapping[File, set[str]] | None = None

    def select(self, file: File, tensors: list[StoredTensor]) -> list[StoredTensor]:
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

    def gather(
        self, where: object, headers: Iterable[tuple[File, list[StoredTensor]]]
    ) -> list[StoredTensor]:
        """The tensors of the checkpoint ``where``, given each file with all of its own.

        Raises `SourceError` if one is absent, there twice or of an adapter, or if there is none.
        """
        tensors: dict[str, StoredTensor] = {}
        for file, found in headers:
            for tensor in self.select(file, found):
                if is_of_adapter(tensor.spec.name):
                    raise SourceError(
                        f"tensor {shown(tensor.spec.name)} in {tensor.file} belongs to an adapter, "
                        "which no server takes for weights: merge it first, or save the adapter "
                        "and push it over its base: peft://ADAPTER?base=CHECKPOINT"
                    )
                other = tensors.setdefault(tensor.spec.name, tensor)
                if other is not tensor:
                    raise SourceError(
                        f"tensor {shown(tensor.spec.name)} is both in {other.file} and in "
                        f"{tensor.file}: name the one file to read, or add an index"
                    )
        if not tensors:
            raise SourceError(f"{shown(where)} holds no tensors: save the checkpoint again")
        return list(tensors.values())


@dataclass(frozen=True)
class Choice:
    """What to read of a folder: its index, or else whole files."""

    index: str | None
    files: Sequence[str] = ()


def find_layout(where: str | os.PathLike[str]) -> Layout[Path]:
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
    refuse_adapter(path, path.name)
    return _of_index(path) if path.suffix == ".json" else Layout([path])


def refuse_adapter(where: object, name: str) -> None:
    """Raise `SourceError` if a file of this name is no model."""
    if name.startswith(_ADAPTER):
        raise SourceError(f"{shown(where)} is a LoRA adapter, not a model: {_MERGE}")


def _of_folder(folder: Path) -> Layout[Path]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise SourceError(f"cannot list {shown(folder)}: {error.strerror}") from error
    choice = choose(
        folder, names, lambda: (path.parent.name for path in folder.glob(f"*/*{_WEIGHTS}"))
    )
    if choice.index is not None:
        layout = _of_index(folder / choice.index)
    else:
        layout = Layout([folder / name for name in choice.files])
    read = set(layout.files)
    warn_ignored(folder, (name for name in names if folder / name not in read))
    return layout


def choose(where: object, names: Iterable[str], subfolders: Callable[[], Iterable[str]]) -> Choice:
    """Choose among the ``names`` of the files in the folder ``where``.

    ``subfolders()`` are those folders in it that hold weights. Raises `SourceError` if there is no
    model, or no telling which.
    """
    names = sorted(name for name in names if not name.startswith("."))
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    models = [name for name in weights if not name.startswith(_ADAPTER)]
    index = _choose_index(where, names)
    if index is not None:
        return Choice(index)
    if not models:
        raise SourceError(_why_nothing(where, names, weights, sorted(set(subfolders()))))
    # Mistral's own format, beside the same weights under their Hugging Face names.
    converted = [name for name in models if not name.startswith(_CONSOLIDATED)]
    _check_numbering(where, converted or models)
    return Choice(None, converted or models)


def warn_ignored(where: object, names: Iterable[str]) -> None:
    """Log which weights are left out, given the ``names`` of the files that are not read."""
    ignored = sorted(
        name
        for name in names
        if name.endswith(_WEIGHTS) and not name.startswith((".", _CONSOLIDATED))
    )
    if ignored:
        _log.warning("%s: not part of the model, ignored: %s", shown(where), _listed(ignored))


def _choose_index(where: object, names: list[str]) -> str | None:
    found = [name for name in names if name.endswith(_INDEX) and not name.startswith(_ADAPTER)]
    if f"model{_INDEX}" in found:
        return f"model{_INDEX}"
    if len(found) > 1:
        raise SourceError(
            f"{shown(where)} has several indexes, {_listed(found)}: name one of them as the source"
        )
    return found[0] if found else None


def _check_numbering(where: object, names: list[str]) -> None:
    """Refuse shards numbered ``i of n`` that are not ``n``: without an index nothing else tells."""
    shards: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            shards[match[1], match[3]] += 1
    for (stem, total), count in shards.items():
        if count != int(total):
            raise SourceError(
                f"{shown(where)} has {count} of the {int(total)} shards "
                f"{shown(stem)}-*-of-{total}{_WEIGHTS}, and no index: download or copy all of them"
            )


def _why_nothing(
    where: object, names: list[str], adapters: list[str], subfolders: list[str]
) -> str:
    if adapters:
        return f"{shown(where)} holds only a LoRA adapter ({_listed(adapters)}): {_MERGE}"
    nothing = f"{shown(where)} holds no *{_WEIGHTS} file"
    if subfolders:
        return f"{nothing}; its subfolders do, name one of them: {_listed(subfolders)}"
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if others:
        return (
            f"{nothing}, only PyTorch files ({_listed(others)}): convert them (load the model "
            "with transformers, then save_pretrained writes safetensors)"
        )
    return f"{nothing}; it is empty" if not names else f"{nothing}, only {_listed(names)}"


def _of_index(index: Path) -> Layout[Path]:
    wanted: dict[Path, set[str]] = {}
    for entry, tensors in parse_index(_read(index), index).items():
        shard = index.parent / entry
        # The file itself may be a link to anywhere, as in the Hugging Face cache.
        if not _is_inside(shard.parent, index.parent):
            raise SourceError(not_inside(index, entry, min(tensors)))
        wanted[shard] = tensors
    missing = [file for file in wanted if not os.path.exists(file)]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(wanted)} shards that {shown(index)} names are missing: "
            f"{', '.join(map(_described_missing, missing))}; download or copy them"
        )
    return Layout(list(wanted), index, wanted)


def _read(index: Path) -> bytes:
    with closing(OpenFile(index)) as file:
        if file.size > MAX_JSON_SIZE:
            raise SourceError(
                f"{file} is {file.size} bytes long, and {MAX_JSON_SIZE} are allowed for an index"
            )
        return file.read(0, file.size)


def _is_inside(inner: Path, outer: Path) -> bool:
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))


def _described_missing(file: Path) -> str:
    target = broken_link(file)
    return shown(file.name) + (f" (a link to {target}, which leads to no file)" if target else "")


def _listed(names: Iterable[str]) -> str:
    return shown(", ".join(names))


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
