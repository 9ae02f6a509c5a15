"""An adapter's folder over a base: merged tensor by tensor as the base is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from streamer_safetensors.file import OpenFile
from streamer_safetensors.header import read_header
from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError, UsageError
from streamer.payloads import cast_payload
from streamer.ranks import Ranks
from streamer.registry import open_source
from streamer.source import Payload, TensorSpec, WeightSource
from streamer.transformed import Output, Transformed
from streamer.transforms import CAST_DTYPES
from streamer_peft.config import AdapterConfig, read_config
from streamer_peft.lora import Lora, orient, sort_tensors

_log = logging.getLogger("streamer")

_FILE = "adapter_model.safetensors"

Change = Callable[[TensorSpec, Payload], torch.Tensor]


class AdapterSource(WeightSource):
    """The tensors of ``base`` with the LoRA adapter of ``folder`` merged in, under base names.

    The values are those of ``PeftModel.from_pretrained(model, folder).merge_and_unload()``, bit for
    bit on the same device. One weight at a time is read and merged, on the device where the base
    yields it; what the adapter does not touch is passed on as it comes. What was trained whole
    (``modules_to_save``, biases) replaces the base's, in its dtype; what the base lacks comes last.

    The base's ``weight_version`` is not passed on, for these are other weights. Raises
    `SourceError` at the opening if adapter and base do not fit, and for what cannot be merged from
    files.
    """

    def __init__(self, folder: str, base: object) -> None:
        path = Path(folder).expanduser()
        config = read_config(path)
        if base is None:
            hint = f"; its configuration says {shown(config.base)}" if config.base else ""
            raise UsageError(
                f"{shown(path)} is an adapter: say what it was trained on with base=, or as "
                f"peft://{shown(folder)}?base=CHECKPOINT{hint}"
            )
        with ExitStack() as opened:
            self._file = opened.enter_context(closing(_open(path)))
            loras, self._replaced = sort_tensors(read_header(self._file), str(self._file))
            source = open_source(base)
            if source is not base:
                opened.callback(source.close)
            given = {spec.name: spec for spec in source.specs()}
            self._added = [name for name in self._replaced if name not in given]
            if self._added:
                _log.warning(
                    "%s adds %s to the base (a server with tied embeddings ignores an lm_head)",
                    self._file,
                    shown(", ".join(self._added)),
                )
            specs = {name: self._new_spec(spec) for name, spec in given.items()}
            self._changes = _fit(loras, specs, config)
            self._merged = Transformed(source, self._rule)
            self._opened = opened.pop_all()

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`."""
        added = [replace(self._replaced[name].spec, name=name) for name in self._added]
        return [*self._merged.specs(), *added]

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        self._file.check_unchanged()
        yield from self._merged
        for name in self._added:
            yield name, self._replaced[name]

    @property
    def ranks(self) -> Ranks | None:  # type: ignore[override]  # it is the base's
        """See `WeightSource.ranks`."""
        return self._merged.ranks

    def catch_up(self, stop: int | None) -> None:
        """See `WeightSource.catch_up`. What the adapter adds is read by each rank alone."""
        self._merged.catch_up(stop)

    def progress(self) -> int:
        """See `WeightSource.progress`. It is the base that may wait for a network."""
        return self._merged.progress()

    def close(self) -> None:
        """Close the adapter's file, and the base if it was opened here."""
        self._opened.close()

    def _new_spec(self, spec: TensorSpec) -> TensorSpec:
        """``spec`` after the merge: a replacement may have more rows, never another dtype."""
        stored = self._replaced.get(spec.name)
        if stored is None:
            return spec
        if stored.spec.dtype != spec.dtype and not {stored.spec.dtype, spec.dtype} <= {
            *CAST_DTYPES
        }:
            raise SourceError(
                f"{shown(stored.spec)} of {self._file} replaces {shown(spec)}, a dtype that it "
                "cannot be cast to: give the base that it was trained on"
            )
        return replace(spec, shape=stored.spec.shape)

    def _rule(self, spec: TensorSpec) -> Sequence[Output]:
        new = self._new_spec(spec)
        stored = self._replaced.get(spec.name)
        change = self._changes.get(spec.name)

        def make(payload: Payload) -> Payload:
            if stored is not None:
                payload = cast_payload(stored.spec.dtype, spec.dtype, stored)
            return payload if change is None else change(new, payload)

        return [Output(new, make)]


def _open(folder: Path) -> OpenFile:
    pickled = [path.name for path in folder.glob("adapter_model.bin")]
    if pickled and not (folder / _FILE).exists():
        raise SourceError(
            f"{shown(folder)} has its weights in {pickled[0]}, a pickle, which is not read: load "
            f"the adapter with PEFT and save it again, which writes {_FILE}"
        )
    return OpenFile(folder / _FILE)


def _fit(
    loras: Sequence[Lora], specs: Mapping[str, TensorSpec], config: AdapterConfig
) -> dict[str, Change]:
    """What changes which tensor of the base. Raises `SourceError` unless all of it fits."""
    if not loras:
        raise SourceError("the adapter has no matrices A and B: nothing to merge")
    weights = [_base_spec(lora, "weight", specs) for lora in loras]
    # A square matrix fits both ways. All of a model's linear layers are stored in one way.
    turned = {
        orient(lora, weight.shape, False).transposed
        for lora, weight in zip(loras, weights, strict=True)
        if not lora.embedding and lora.shape[0] != lora.shape[1]
    }
    square = turned.pop() if len(turned) == 1 else config.fan_in_fan_out
    changes: dict[str, Change] = {}
    for lora, weight in zip(loras, weights, strict=True):
        expected = config.rank_of(lora.module)
        if lora.rank != expected or (lora.magnitude is not None) != config.dora:
            found = f"rank {lora.rank} with{'' if lora.magnitude else 'out'} DoRA"
            raise SourceError(
                f"{shown(lora.module)} has {found}, and the configuration says rank {expected} "
                f"with{'' if config.dora else 'out'} DoRA: they are of different adapters"
            )
        fitted = replace(orient(lora, weight.shape, square), scaling=config.scaling_of(lora.module))
        changes[weight.name] = fitted.merge_weight
        if lora.bias is not None:
            changes[_base_spec(lora, "bias", specs).name] = fitted.merge_bias
    return changes


def _base_spec(lora: Lora, key: str, specs: Mapping[str, TensorSpec]) -> TensorSpec:
    name = f"{lora.module}.{key}"
    spec = specs.get(name)
    if spec is None:
        raise SourceError(
            f"the adapter changes {shown(name)}, which is not in the base (there is "
            f"{shown(next(iter(specs), 'nothing'))}, for one): give the base that it was trained "
            "on; where the base ties it to another weight, train that one"
        )
    if spec.dtype not in CAST_DTYPES:
        raise SourceError(
            f"the adapter changes {shown(spec)}, and it can be merged only into plain floats: give "
            "a base that is not quantized"
        )
    return spec
