"""What becomes of each of the trainer's tensors: under which names it is served, cut where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from streamer import SourceError, TensorSpec
from streamer_plugin_example.checkpoint import Settings

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
"""How the ranks share a tensor: rows of each, columns of each, or all of it everywhere."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A tensor of the served model.

    ``rows`` are those of each rank's part of ``source`` that belong to it. ``spec`` is of the whole
    tensor, whose rows end where the ranks' parts give more: a vocabulary is padded by the trainer.
    """

    spec: TensorSpec
    source: TensorSpec
    shared: str
    rows: slice


Cut = Callable[[Settings, int], list[int]]
"""How many rows of a rank's part go to each served name, given all rows of the part."""


def _all(settings: Settings, rows: int) -> list[int]:
    return [rows]


def _halves(settings: Settings, rows: int) -> list[int]:
    return [rows // 2, rows // 2]


def _qkv(settings: Settings, rows: int) -> list[int]:
    ranks, dim = settings.tensor_parallel, settings.head_dim
    queries, keys = settings.heads // ranks * dim, settings.kv_heads // ranks * dim
    return [queries, keys, keys]


@dataclass(frozen=True)
class Rule:
    """For tensors whose name ``pattern`` matches; its groups are put into the served ``names``."""

    pattern: str
    shared: str
    names: Sequence[str]
    cut: Cut = _all
    padded: bool = False


_OURS = r"decoder\.(?P<layer>\d+)\."
_THEIRS = "model.layers.{layer}."
_RULES = [
    Rule(r"embedding\.table", ROWS, ["model.embed_tokens.weight"], padded=True),
    Rule(
        _OURS + r"attention\.qkv\.(?P<kind>weight|bias)",
        ROWS,
        [_THEIRS + f"self_attn.{part}_proj.{{kind}}" for part in "qkv"],
        _qkv,
    ),
    Rule(_OURS + r"attention\.out\.weight", COLUMNS, [_THEIRS + "self_attn.o_proj.weight"]),
    Rule(
        _OURS + r"mlp\.gate_up\.weight",
        ROWS,
        [_THEIRS + f"mlp.{part}_proj.weight" for part in ("gate", "up")],
        _halves,
    ),
    Rule(_OURS + r"mlp\.down\.weight", COLUMNS, [_THEIRS + "mlp.down_proj.weight"]),
    Rule(_OURS + r"norm_in\.scale", WHOLE, [_THEIRS + "input_layernorm.weight"]),
    Rule(_OURS + r"norm_mid\.scale", WHOLE, [_THEIRS + "post_attention_layernorm.weight"]),
    Rule(r"final_norm\.scale", WHOLE, ["model.norm.weight"]),
    Rule(r"head\.table", ROWS, ["lm_head.weight"], padded=True),
]


def fuse(settings: Settings, part: TensorSpec) -> Iterator[Fused]:
    """The served tensors that are made of ``part``, which is what each rank has of one tensor.

    Raises `SourceError` if it does not fit ``settings``, or if no rule is for it: leaving it out in
    silence would serve a model with an old weight in it.
    """
    rule, groups = _rule_for(part.name)
    dimensions = (2,) if rule.shared == COLUMNS else (1, 2)
    if not part.nbytes or len(part.shape) not in dimensions:
        raise SourceError(f"{part} cannot be fused: a tensor of {rule.shared} has another shape")
    ranks = settings.tensor_parallel
    counts = rule.cut(settings, part.shape[0])
    if sum(counts) != part.shape[0]:
        raise SourceError(
            f"{part} has {part.shape[0]} rows on each rank, and trainer.json says {sum(counts)}"
        )
    start = 0
    for name, count in zip(rule.names, counts, strict=True):
        rows = count * ranks if rule.shared == ROWS else count
        if rule.padded and settings.vocab_size > rows:
            raise SourceError(
                f"{part} has {rows} rows on {ranks} ranks, and trainer.json says that the "
                f"vocabulary has {settings.vocab_size}"
            )
        columns = [size * ranks if rule.shared == COLUMNS else size for size in part.shape[1:]]
        shape = (settings.vocab_size if rule.padded else rows, *columns)
        spec = replace(part, name=name.format(**groups), shape=shape)
        yield Fused(spec, part, rule.shared, slice(start, start + count))
        start += count


def _rule_for(name: str) -> tuple[Rule, dict[str, str]]:
    for rule in _RULES:
        match = re.fullmatch(rule.pattern, name)
        if match:
            return rule, match.groupdict()
    raise SourceError(f"{name}: streamer-plugin-example has no rule for it; add one to layout.py")
