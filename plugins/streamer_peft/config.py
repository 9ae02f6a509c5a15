"""``adapter_config.json``: what of it decides the merge, and what cannot be merged from files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer_safetensors.untrusted import parse_json, shown

from streamer.exceptions import SourceError

FILE = "adapter_config.json"
_MAX_SIZE = 1 << 24
_WITH_PEFT = (
    "merge it with PEFT (PeftModel.from_pretrained, then push the model, or merge_and_unload() and "
    "save_pretrained)"
)
# What has been done, or is done in training, and changes nothing about the merge.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_USED = {
    "alpha_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "use_dora",
    "use_rslora",
}
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to make the first A and B that leave the base as it was."""


@dataclass(frozen=True)
class AdapterConfig:
    """How the matrices of a LoRA adapter act. ``base`` is the name of the base that it gives."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    dora: bool
    fan_in_fan_out: bool
    base: str | None

    def rank_of(self, module: str) -> int:
        """The rank for the module of this name in the base model."""
        rank: int = _fitting(self.rank_pattern, module, self.rank)
        return rank

    def scaling_of(self, module: str) -> float:
        """The factor of ``B @ A``."""
        alpha: float = _fitting(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_config(folder: Path) -> AdapterConfig:
    """Read the configuration in ``folder``.

    Raises `SourceError` if it is not there, not sound, not of LoRA, or asks for a merge that is not
    known here; then it names the option.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            content = parse_json(file.read(_MAX_SIZE))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        _check_options(path, content)
        return AdapterConfig(
            rank=_number(content, "r", int),
            alpha=_number(content, "lora_alpha", (int, float)),
            rank_pattern=_pattern(content, "rank_pattern", int),
            alpha_pattern=_pattern(content, "alpha_pattern", (int, float)),
            rslora=bool(content.get("use_rslora")),
            dora=bool(content.get("use_dora")),
            fan_in_fan_out=bool(content.get("fan_in_fan_out")),
            base=content.get("base_model_name_or_path") or None,
        )
    except OSError as error:
        raise SourceError(
            f"{shown(folder)} is no folder of a PEFT adapter: cannot open {FILE}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise SourceError(f"{shown(path)} is not an adapter's configuration: {error}") from error


def _check_options(path: Path, content: Mapping[str, Any]) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise SourceError(f"{shown(path)} is of the method {shown(kind)}, not LORA: {_WITH_PEFT}")
    start = content.get("init_lora_weights", True)
    if start not in _PLAIN_INIT:
        raise SourceError(
            f"{shown(path)}: init_lora_weights={shown(repr(start))} has changed the base weights: "
            f"{_WITH_PEFT}"
        )
    for name, value in sorted(content.items()):
        if value and name not in _USED and name not in _WITHOUT_EFFECT:
            raise SourceError(
                f"{shown(path)}: {shown(name)}={shown(repr(value))} is nothing that can be merged "
                f"here: {_WITH_PEFT}"
            )


def _number(content: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = content.get(key, 8)
    if not _is_number(value, kind) or (key == "r" and value < 1):
        raise ValueError(f"{key} is {shown(repr(value))}, not a number that can be right")
    return value


def _is_number(value: object, kind: Any) -> bool:
    try:
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def _pattern(content: Mapping[str, Any], key: str, kind: Any) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict) or not all(
        _is_number(number, kind) and number > 0 for number in value.values()
    ):
        raise ValueError(f"{key} is no object of positive numbers")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{key}: {shown(pattern)} is no regular expression: {error}") from None
    return value


def _fitting(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first expression that fits the end of a module's name, as PEFT finds it."""
    for expression, value in pattern.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default
