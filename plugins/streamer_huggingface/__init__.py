"""Models on the Hugging Face Hub: ``hf://org/name@revision``."""

from __future__ import annotations

import os

from streamer.hookspecs import Register, hookimpl
from streamer.source import WeightSource

__all__ = ["open_hub", "streamer_register_sources"]


def open_hub(
    rest: str,
    *,
    no_cache: bool | str = False,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    connections: int | str | None = None,
    download_first: bool | str = False,
) -> WeightSource:
    """Open ``hf://rest``, which is ``org/name[/folder or file][@revision]``.

    The revision (``main`` by default) is resolved to a commit once, here, and all that is read
    later is read at it. The ``weight_version`` is that commit, or ``commit:path`` of a folder or a
    file. Every header has been checked when this returns, and no weight has been downloaded yet.

    - ``no_cache``: read straight from the Hub into the broadcaster's memory, nothing on disk.
      Otherwise files go through the cache of ``huggingface_hub``, and each is streamed as soon as
      it is complete, while the next ones download.
    - ``token``: as in ``huggingface_hub``: None takes HF_TOKEN or the stored login, False sends
      none. It is sent to the endpoint only, and never shown.
    - ``cache_dir`` and ``endpoint``: in place of HF_HUB_CACHE and HF_ENDPOINT.
    - ``connections``: with ``no_cache`` the requests at once (16), else the downloads at once (1).
    - ``download_first``: download all files before this returns.

    Text is taken for any option, as the command line gives it. Raises `SourceError` that names the
    repository, the revision, and whether a token was sent.
    """
    from streamer_huggingface.source import open_source

    return open_source(
        rest,
        no_cache=no_cache,
        token=token,
        cache_dir=cache_dir,
        endpoint=endpoint,
        connections=connections,
        download_first=download_first,
    )


@hookimpl
def streamer_register_sources(register: Register) -> None:
    """Register ``hf://``."""
    register(
        "hf",
        open_hub,
        summary="a model on the Hugging Face Hub: hf://org/name[/folder or file][@revision]",
    )
