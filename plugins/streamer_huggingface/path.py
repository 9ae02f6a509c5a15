"""What ``hf://`` names: a repository, a place in it, and a revision."""

from __future__ import annotations

import re
from dataclasses import dataclass

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError

_GRAMMAR = "hf://org/name[/folder or file][@revision]"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_IN_A_REVISION = re.compile(r"[\s\\~^:?*\[\x00-\x1f\x7f]|\.\.|//|^/|/$|^-|@\{")
"""What git allows in no name of a branch or tag; ``..`` would lead out of the cache, too."""
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")


@dataclass(frozen=True)
class HubPath:
    """``hf://repo[/path]@revision``.

    ``path`` is a folder or a file of the repository, "" for its root.
    """

    repo: str
    revision: str
    path: str = ""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a full commit hash, which can never mean anything else."""
        return _COMMIT.fullmatch(self.revision) is not None

    def version(self, commit: str) -> str:
        """What the weights are called that this is at ``commit``: no other place in it has them."""
        return f"{commit}:{self.path}" if self.path else commit

    def __str__(self) -> str:
        return f"hf://{self.repo}{self.path and '/'}{self.path}@{self.revision}"


def parse_path(rest: object) -> HubPath:
    """Parse what follows ``hf://``. Raises `SourceError` that says what is wrong with it.

    The revision is everything after the first ``@``, slashes included; the first two parts before
    it are the repository (the only one, for the few old repositories without an organization).
    """
    if not isinstance(rest, str) or not rest:
        raise SourceError(f"hf:// names no model: write {_GRAMMAR}")
    where, at, revision = rest.partition("@")
    if at and not revision:
        raise SourceError(
            f"hf://{shown(rest)} has no revision after its @: name a branch, a tag or a commit, or "
            f"leave the @ out for main ({_GRAMMAR})"
        )
    if _NOT_IN_A_REVISION.search(revision):
        raise SourceError(
            f"hf://{shown(rest)}: {shown(revision)} cannot be a revision: it is all that follows "
            f"the first @, a branch, a tag or a commit ({_GRAMMAR})"
        )
    parts = where.split("/")
    if parts[0] in _OTHER_KINDS:
        raise SourceError(f"hf://{shown(rest)} is one of the Hub's {parts[0]}, not a model")
    if parts[0] == "models" and len(parts) > 2:
        raise SourceError(f"hf://{shown(rest)}: leave models/ out ({_GRAMMAR})")
    if not all(parts) or not where.isprintable() or {".", ".."}.intersection(parts):
        raise SourceError(
            f"hf://{shown(rest)}: between the slashes must be names, none of them empty, . or .. "
            f"({_GRAMMAR})"
        )
    repo = "/".join(parts[:2])
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise SourceError(
            f"hf://{shown(rest)}: {shown(repo)} cannot be a model's name on the Hub ({_GRAMMAR})"
        ) from error
    return HubPath(repo, revision or "main", "/".join(parts[2:]))
