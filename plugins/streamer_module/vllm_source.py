"""Objects of the shape of vLLM's own ``WeightSource``: taken as they are, without importing vLLM.

In 0.32 ``metadata()`` is a method and iterating gives the pairs; in 0.33 ``metadata`` is a cached
property and ``iter_full()`` gives them. An entry of the metadata has a name, a dtype, a shape, and
in 0.33 the ranks that own it. With ``placements``, what 0.32 iterates over are a rank's pieces.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from streamer.exceptions import SourceError
from streamer.integrations.lockstep import Lockstep
from streamer.source import TensorSpec
from streamer_module.named import check_names, check_tensor


def is_vllm_source(source: object) -> bool:
    """Whether ``source`` has the shape. Runs none of its code."""
    return (
        not isinstance(source, (type, Mapping))
        and _has(source, "metadata")
        and (_has(source, "iter_full") or _has(source, "__iter__"))
    )


class VllmSource(Lockstep):
    """What an object of vLLM's shape declares and yields, under the names that it gives.

    In a process group every rank pushes it, for vLLM has all of them iterate it in step. Rank 0
    sends, so it must own every parameter: one that it does not own is an error at the opening, and
    so is a source that only yields pieces (``iter_local``).
    """

    def __init__(self, source: Any) -> None:
        super().__init__(self._read)
        self._source = source
        implements = getattr(source, "implements_iter_full", None)
        if implements is not None and not implements():
            raise SourceError(
                f"{type(source).__name__} yields only its rank's pieces: it needs iter_full()"
            )
        specs = self.specs()
        check_names((spec.name, spec.name) for spec in specs)
        held: Collection[str] | None = getattr(source, "held_names", lambda: None)()
        full = _has(source, "iter_full")
        sends = self.ranks is None or self.ranks.sends
        for spec, entry in zip(specs, self._metadata(), strict=True):
            owners = getattr(entry, "owners", None)
            if not full and getattr(entry, "placements", None) is not None:
                raise SourceError(
                    f"{spec.name} comes in pieces, one of each rank: push the module that has it"
                )
            if (sends and held is not None and spec.name not in held) or (
                owners is not None and 0 not in owners
            ):
                raise SourceError(
                    f"{spec.name} is not held by rank 0, which sends: gather it there"
                )

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`."""
        try:
            return [
                TensorSpec(item.name, item.dtype, tuple(item.shape)) for item in self._metadata()
            ]
        except (AttributeError, TypeError) as error:
            raise SourceError(
                f"the metadata of a {type(self._source).__name__} must be entries with name, dtype "
                f"and shape, as vLLM's ParamMeta: {error}"
            ) from error

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        full = _has(self._source, "iter_full")
        for name, tensor in self._source.iter_full() if full else self._source:
            check_tensor(name, tensor)
            yield name, tensor.detach()
            del tensor  # it would be held while the next one is made

    def _metadata(self) -> Sequence[Any]:
        metadata = self._source.metadata
        entries: Sequence[Any] = metadata() if callable(metadata) else metadata
        return entries


def _has(source: object, name: str) -> bool:
    return inspect.getattr_static(source, name, None) is not None
