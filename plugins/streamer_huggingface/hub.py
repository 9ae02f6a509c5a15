"""Asking the Hub, through ``huggingface_hub``: which commit, which files, and the index."""

from __future__ import annotations

import importlib.metadata

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from streamer.exceptions import UsageError
from streamer.hookspecs import PROJECT
from streamer_huggingface.path import HubPath
from streamer_huggingface.retry import Retries
from streamer_huggingface.target import Target, Token
from streamer_huggingface.worker import describe

VERSION = importlib.metadata.version(PROJECT)


def make_target(path: HubPath, endpoint: str | None, token: str | bool | None) -> Target:
    """A target with the endpoint and the token that ``huggingface_hub`` would choose.

    Raises `UsageError`, which never shows the token, if one of them cannot be.
    """
    chosen = (endpoint or constants.ENDPOINT).rstrip("/")
    if not chosen.startswith(("http://", "https://")):
        raise UsageError(f"endpoint: {chosen!r} is not the URL of a Hub, http(s)://host")
    try:
        headers = build_hf_headers(token=token, library_name=PROJECT, library_version=VERSION)
    except OSError as error:
        raise UsageError("token is True, but none is stored: run hf auth login") from error
    sent = headers.get("authorization", "").removeprefix("Bearer ")
    if not sent.isascii() or not sent.isprintable() or " " in sent:
        # Whoever refuses it later would print it.
        raise UsageError("the token is not one: it has blanks or line breaks, or is not ASCII")
    return Target(path, chosen, Token(sent) if sent else None, headers["user-agent"])


def list_files(target: Target) -> tuple[str, list[str]]:
    """The commit that the revision is now, and the names of all files at it: one request."""
    api = HfApi(
        endpoint=target.endpoint,
        token=target.token_or_false,
        library_name=PROJECT,
        library_version=VERSION,
    )
    retries = Retries()
    while True:
        try:
            info = api.model_info(
                target.path.repo,
                revision=target.path.revision,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            break
        except Exception as error:
            failure = describe(error)
            if not retries.again(failure):
                raise target.failed(failure) from error
    if not info.sha:
        raise target.error("the Hub did not say which commit this is", "check HF_ENDPOINT")
    return info.sha, [sibling.rfilename for sibling in info.siblings or ()]


def download(target: Target, commit: str, file: str, cache_dir: str) -> str:
    """Download a small file into the cache, and return its path. Raises `SourceError`."""
    try:
        return hf_hub_download(
            target.path.repo,
            file,
            revision=commit,
            cache_dir=cache_dir,
            endpoint=target.endpoint,
            token=target.token_or_false,
            library_name=PROJECT,
            library_version=VERSION,
        )
    except Exception as error:  # it has tried again by itself
        raise target.failed(describe(error), file) from error
