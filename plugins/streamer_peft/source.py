"""Which of the two sources opens what is given."""

from __future__ import annotations

import os
from urllib.parse import unquote

from streamer_module.structure import is_adapted, is_sharded
from torch import nn

from streamer.exceptions import SourceError, UsageError
from streamer.source import WeightSource


def accepts(source: object) -> bool:
    """Whether `open_peft` is for ``source``. A sharded model is not: it must be gathered first."""
    return isinstance(source, nn.Module) and is_adapted(source) and not is_sharded(source)


def open_peft(source: object, *, base: object = None, tied: str | None = None) -> WeightSource:
    """Open a PEFT model, or an adapter's folder over a base.

    ``source`` is a module, or a folder that ``save_pretrained`` of a PEFT model wrote. For a folder
    ``base`` is what the adapter was trained on: a path, a URI, or any source; ``?base=`` behind the
    folder says the same. For a module ``tied`` is as for the source ``module``.
    """
    if isinstance(source, nn.Module):
        from streamer_peft.module import PeftModuleSource

        if base is not None:
            raise UsageError("a PEFT model has its base: it takes no option base")
        return PeftModuleSource(source, tied or "all")
    if not isinstance(source, (str, os.PathLike)):
        raise SourceError(f"the source peft takes a PEFT model or a folder, not {source!r:.80}")
    if tied is not None:
        raise UsageError("an adapter over a base takes no option tied")
    from streamer_peft.adapter import AdapterSource

    folder, queried = _parse(os.fspath(source))
    if base is not None and queried is not None:
        raise UsageError(f"the base is given twice: {base} and {queried}")
    return AdapterSource(folder, queried if base is None else base)


def _parse(rest: str) -> tuple[str, str | None]:
    """The folder and the base of ``folder?base=...``, which may be percent-encoded."""
    folder, question, query = rest.partition("?")
    if not question:
        return rest, None
    key, equals, value = query.partition("=")
    if key != "base" or not equals or not value:
        raise UsageError(f"peft://{rest}: behind ? comes base=CHECKPOINT and nothing else")
    return folder, unquote(value)
