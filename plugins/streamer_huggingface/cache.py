"""What ``huggingface_hub`` has in its cache, found without asking the Hub anything.

The layout is the documented one: ``models--org--name/`` with ``refs/<revision>``, which holds a
commit, and ``snapshots/<commit>/<file>``.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from streamer_huggingface.path import HubPath


class Cache:
    """One repository in a cache folder, HF_HUB_CACHE if none is given. It need not exist."""

    def __init__(self, path: HubPath, folder: str | os.PathLike[str] | None) -> None:
        self.folder = Path(folder or constants.HF_HUB_CACHE).expanduser().absolute()
        self._path = path
        self._repo = self.folder / repo_folder_name(repo_id=path.repo, repo_type="model")

    def commit(self) -> str | None:
        """The commit that the revision was when it was last asked for, None if it never was."""
        if self._path.pinned:
            return self._path.revision
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = self._ref.read_text().strip()
            if re.fullmatch(r"[0-9a-f]{40}", commit):
                return commit
        return None

    def remember(self, commit: str) -> None:
        """Note which commit the revision is, for when there is no network. Best effort."""
        if self._path.pinned or self.commit() == commit:
            return
        with contextlib.suppress(OSError):
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._ref.with_name(f"{self._ref.name}.{uuid.uuid4().hex}.tmp")
            fresh.write_text(commit)
            fresh.replace(self._ref)

    def file(self, commit: str, name: str) -> Path | None:
        """Where a file is, None if it is not there."""
        path = self._snapshot(commit) / name
        return path if path.is_file() else None

    def files(self, commit: str) -> list[str]:
        """The names of the files that are there, by no means all that there are at the commit."""
        snapshot = self._snapshot(commit)
        found = (path for path in snapshot.rglob("*") if path.is_file())
        return sorted(path.relative_to(snapshot).as_posix() for path in found)

    def arriving(self) -> int:
        """Bytes of the files that are being written."""
        total = 0
        with contextlib.suppress(OSError):  # it may be complete before it is looked at
            for path in (self._repo / "blobs").glob("*.incomplete"):
                total += path.stat().st_size
        return total

    @property
    def _ref(self) -> Path:
        return self._repo / "refs" / self._path.revision

    def _snapshot(self, commit: str) -> Path:
        return self._repo / "snapshots" / commit
