"""Which objects the source is for. What gathers is imported only when one is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamer_module.structure import is_adapted, is_sharded, is_sharded_tensor
from torch import nn

from streamer.exceptions import SourceError, UsageError
from streamer.source import WeightSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def accepts(source: object) -> bool:
    """Whether `open_fsdp` is for ``source``: something of it is sharded over ranks."""
    if isinstance(source, nn.Module):
        return is_sharded(source)
    return isinstance(source, Mapping) and any(map(is_sharded_tensor, source.values()))


def open_fsdp(
    source: object,
    *,
    tied: str = "all",
    wrappers: str = "strip",
    group: ProcessGroup | None = None,
) -> WeightSource:
    """Open a module or a state dict that is sharded over ranks, on every rank of ``group``.

    ``tied`` and ``wrappers`` are as for the source ``module``. ``group`` is the default process
    group if it is not given; its rank 0 sends, and every rank of a tensor's mesh must be in it.
    Raises `SourceError` for weights that cannot be sent, `UsageError` outside of a group.
    """
    from streamer_module.named import TIED
    from streamer_module.source import WRAPPERS

    from streamer_fsdp.source import ShardedSource

    for option, value, known in (("tied", tied, TIED), ("wrappers", wrappers, WRAPPERS)):
        if value not in known:
            raise UsageError(f"{option} must be one of {', '.join(known)}, not {value!r}")
    if not isinstance(source, (nn.Module, Mapping)):
        raise SourceError(
            f"the source fsdp takes no {type(source).__name__}: push the module, or a state dict"
        )
    if isinstance(source, nn.Module) and is_adapted(source):
        raise SourceError(
            "it is a PEFT model that is sharded over ranks, and adapters merge into whole weights "
            "only: save the adapter and push it over its base, as peft://ADAPTER?base=CHECKPOINT"
        )
    return ShardedSource(source, tied, wrappers, group)
