"""Which files of a repository are its model. None is read here but the index.

The rules are those of a checkpoint folder, `streamer_safetensors.folder`, and one more: a
``model.safetensors`` without an index is the model, whatever is beside it, as it is for
``transformers``. So a part of the repository, the cache, tells as much as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import PurePosixPath

from streamer_safetensors.folder import Layout, choose, refuse_adapter, warn_ignored
from streamer_safetensors.index import parse_index
from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError
from streamer_huggingface.target import Target

_WEIGHTS = ".safetensors"
_INDEX = f"model{_WEIGHTS}.index.json"
_SINGLE = f"model{_WEIGHTS}"

ReadIndex = Callable[[str], bytes]


def find_layout(target: Target, names: Collection[str], read_index: ReadIndex) -> Layout[str]:
    """The layout, given the ``names`` of all files at the commit.

    Raises `SourceError` if there is no model, or if shards are missing.
    """
    place = target.path.path
    if place in names:
        return _of_file(target, place, read_index, names)
    inside = _inside(place, names)
    if not inside:
        problem = f"there is no file and no folder {shown(place)}" if place else "it has no files"
        raise target.error(problem, f"see {target.page}")
    direct = [name for name in inside if "/" not in name]
    if _SINGLE in direct and _INDEX not in direct:
        layout = Layout([_joined(place, _SINGLE)])
    else:
        with target.named():
            choice = choose(place or "the repository", direct, lambda: _subfolders(inside))
        if choice.index is not None:
            layout = _of_index(target, _joined(place, choice.index), read_index, names)
        else:
            layout = Layout([_joined(place, name) for name in choice.files])
    unread = (name for name in direct if _joined(place, name) not in layout.files)
    warn_ignored(target, unread)
    return layout


def cached_layout(
    target: Target, names: Collection[str], read_index: ReadIndex
) -> Layout[str] | None:
    """The layout, given the ``names`` of the files that are in the cache; None if they do not tell.

    Its files may be missing there.
    """
    place = target.path.path
    if place.endswith(_WEIGHTS):
        return _of_file(target, place, read_index)
    if place in names:
        return _of_file(target, place, read_index)
    if _joined(place, _INDEX) in names:
        return _of_index(target, _joined(place, _INDEX), read_index)
    if _joined(place, _SINGLE) in names:
        return Layout([_joined(place, _SINGLE)])
    return None


def _of_file(
    target: Target, file: str, read_index: ReadIndex, names: Collection[str] | None = None
) -> Layout[str]:
    with target.named():
        refuse_adapter(file, PurePosixPath(file).name)
    return _of_index(target, file, read_index, names) if file.endswith(".json") else Layout([file])


def _of_index(
    target: Target, index: str, read_index: ReadIndex, names: Collection[str] | None = None
) -> Layout[str]:
    folder = PurePosixPath(index).parent
    raw = read_index(index)
    with target.named():
        wanted = {
            str(folder / shard): tensors for shard, tensors in parse_index(raw, index).items()
        }
        missing = [file for file in wanted if names is not None and file not in names]
        if missing:
            raise SourceError(
                f"{len(missing)} of {len(wanted)} shards that {index} names are not in the "
                f"repository: {', '.join(map(shown, missing))}; take another revision"
            )
    return Layout(list(wanted), index, wanted)


def _inside(folder: str, names: Iterable[str]) -> list[str]:
    prefix = _joined(folder, "")
    return [name[len(prefix) :] for name in names if name.startswith(prefix)]


def _subfolders(inside: list[str]) -> set[str]:
    paths = (PurePosixPath(name) for name in inside if name.endswith(_WEIGHTS))
    return {path.parts[0] for path in paths if len(path.parts) == 2}


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
