"""A live PEFT model: every adapted layer is merged when it is its turn, by PEFT's own code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from streamer_module.named import Named, NamedTensors, check_tensor, same_memory
from streamer_module.structure import is_sharded, walk
from torch import nn

from streamer.exceptions import SourceError
from streamer.source import TensorSpec
from streamer_peft.scratch import Scratch

_log = logging.getLogger("streamer")

Copy = Callable[[torch.Tensor], torch.Tensor]
Layers = tuple[BaseTunerLayer, ...]


@dataclass(frozen=True, slots=True)
class _Adapted:
    """Memory that adapters change: the layers that do so, in turn, and its name in the first."""

    layers: Layers
    name: str


class PeftModuleSource(NamedTensors):
    """What ``merge_and_unload()`` would leave, under the base model's names, bit for bit.

    Every active adapter is merged, on the device where its layer is, into a copy of that one layer:
    no more is held. The model keeps its weights and its adapters. It is looked at anew at every
    sync, and must not be changed while it is pushed. ``tied`` is as for a plain module; a tensor
    with several names is sent merged under each of them, as PEFT leaves it.

    Raises `SourceError` at the opening if PEFT cannot merge a layer: it is tried without data.
    """

    def __init__(self, model: nn.Module, tied: str = "all") -> None:
        if is_sharded(model):
            raise SourceError(
                "it is sharded over ranks, and adapters merge into whole weights only: save the "
                "adapter and push it over its base, as peft://ADAPTER?base=CHECKPOINT"
            )
        for part in model.modules():
            _check_method(part)
        self._model = model
        super().__init__(tied)
        self.specs()
        adapted = self._adapted()
        for found in self.tensors():
            change = adapted.pop(same_memory(found.tensor), None)
            if change is not None and len(change.layers) > 1:
                _log.warning(
                    "%s is tied, and the adapter changes it in %d places: all get the sum, as "
                    "after PEFT's own merge",
                    found.name,
                    len(change.layers),
                )

    def look_up(self) -> Iterator[Named]:
        """See `NamedTensors.look_up`. These are the tensors before the merge."""
        for place in walk(self._model, _base_of):
            if f"{type(place.owner).__module__}.".startswith("peft."):
                raise SourceError(
                    f"{place.path} is of a {type(place.owner).__name__}, which cannot be merged"
                )
            yield Named(place.name, place.path, place.tensor)

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. The layers are merged on the meta device."""
        return [
            TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._merged(lambda tensor: tensor.to("meta"), torch.clone)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._merged(torch.clone)

    def _merged(self, *copies: Copy) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor; what adapters change is of merged layers, copied by the first of ``copies``
        that PEFT can merge."""
        adapted = self._adapted()
        layers: Layers = ()
        merged: nn.Module | None = None
        for found in self.tensors():
            change = adapted.get(same_memory(found.tensor))
            if change is None:
                yield found.name, found.tensor.detach()
                continue
            if change.layers != layers:
                merged = None  # before the next one is made
                layers, merged = change.layers, _merge(change.layers, copies, found.path)
            tensor: torch.Tensor = attrgetter(change.name)(merged)
            yield found.name, tensor.detach()
            del tensor

    def _adapted(self) -> dict[object, _Adapted]:
        """What is to be merged, by the memory that it changes."""
        adapted: dict[object, _Adapted] = {}
        inside: set[int] = set()
        for path, layer in self._model.named_modules():
            if not isinstance(layer, BaseTunerLayer) or id(layer) in inside:
                continue
            inside.update(map(id, layer.modules()))
            if all(adapter in layer.merged_adapters for adapter in layer.active_adapters):
                continue
            for key, tensor in layer.named_parameters():
                check_tensor(f"{path}.{key}", tensor)
            for place in walk(layer, _base_of):
                memory = same_memory(place.tensor)
                known = adapted.get(memory)
                if known is None:
                    adapted[memory] = _Adapted((layer,), place.name)
                elif layer not in known.layers:
                    adapted[memory] = replace(known, layers=(*known.layers, layer))
        return adapted


def _merge(layers: Layers, copies: Sequence[Copy], path: str) -> nn.Module:
    """What ``merge_and_unload()`` would put in the place of the first of ``layers``."""
    for number, copy in enumerate(copies, start=1):
        try:
            return _merge_copies(layers, Scratch(copy))[0]
        except Exception as error:
            if number == len(copies):
                raise SourceError(
                    f"{path}: PEFT cannot merge its {type(layers[0]).__name__} layer: "
                    f"{type(error).__name__}: {error}"
                ) from error
    raise AssertionError("no way to copy was given")


@torch.no_grad()
def _merge_copies(layers: Layers, scratch: Scratch) -> list[nn.Module]:
    merged: list[nn.Module] = []
    for layer in layers:
        copied = scratch.copy(layer)
        if hasattr(copied, "unload_and_optionally_merge_module"):
            merged.append(copied.unload_and_optionally_merge_module(True, False, None))
        else:
            copied.merge(safe_merge=False, adapter_names=None)
            merged.append(copied.get_base_layer())
    return merged


def _base_of(module: nn.Module) -> tuple[nn.Module, str]:
    """What stands in the base model where PEFT has put ``module``, and the path to it."""
    path = ""
    while True:
        if isinstance(module, (PeftModel, PeftMixedModel)):
            step = "base_model"
        elif isinstance(module, BaseTuner):
            step = "model"
        elif isinstance(module, BaseTunerLayer):
            step = "base_layer"
        elif isinstance(module, TrainableTokensWrapper):
            step = "token_adapter"
        elif isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters
            step = f"modules_to_save.{active[0]}" if active else "original_module"
        else:
            return module, path
        module = module.get_submodule(step)
        path += f"{step}."


def _check_method(part: nn.Module) -> None:
    """Raise `SourceError` for methods that do not end in weights of the base model."""
    if isinstance(part, PeftModel) and any(
        config.is_prompt_learning for config in part.peft_config.values()
    ):
        raise SourceError(
            "its adapter is made of prompts, not of weights: it cannot be merged into the base"
        )
    if isinstance(part, BaseTuner):
        if any(getattr(config, "layer_replication", None) for config in part.peft_config.values()):
            raise SourceError(
                "its adapter replicates layers, which share their weights: they cannot be merged"
            )
        try:
            part._check_merge_allowed()
        except Exception as error:
            raise SourceError(f"PEFT cannot merge the model: {error}") from error
