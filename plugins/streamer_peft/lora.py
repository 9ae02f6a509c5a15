"""The matrices of a LoRA adapter, as they lie in its file, and the merge of each into a weight."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from streamer_safetensors.file import StoredTensor
from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError
from streamer.payloads import read_tensor
from streamer.source import Payload, TensorSpec
from streamer.transforms import CAST_DTYPES

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A"
    r"|lora_embedding_B|lora_magnitude_vector(\.weight)?)"
)
_FOREIGN = re.compile(r"(^|\.)(lora_|token_adapter\.|trainable_tokens_|prompt_)")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Lora:
    """What changes one module: ``W + scaling * B @ A``, in float32, by the same steps as PEFT.

    ``scaling`` and ``transposed`` (the weight is stored as (in, out)) are set once they are known.
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    embedding: bool
    magnitude: StoredTensor | None
    bias: StoredTensor | None
    scaling: float = 0.0
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The rank, as the matrices have it."""
        return self.a.spec.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of ``B @ A``."""
        return self.b.spec.shape[0], self.a.spec.shape[1]

    def merge_weight(self, spec: TensorSpec, payload: Payload) -> torch.Tensor:
        """The weight of the module with the adapter in it, in memory of its own."""
        weight = _own(payload, spec)
        a, b = (_read(matrix, weight.device) for matrix in (self.a, self.b))
        delta = _turned(b @ a, self.transposed) * self.scaling
        if self.embedding:
            weight += delta.to(weight.dtype)
        elif self.magnitude is None:
            weight += delta
        else:
            norm = torch.linalg.norm(
                _turned(weight, self.transposed) + _turned(delta, self.transposed), dim=1
            )
            factor = _read(self.magnitude, weight.device) / norm
            weight = (_turned(factor.view(-1, 1), self.transposed) * (weight + delta)).to(
                weight.dtype
            )
        return weight

    def merge_bias(self, spec: TensorSpec, payload: Payload) -> torch.Tensor:
        """The bias of the module with that of ``B`` in it, in memory of its own."""
        assert self.bias is not None
        bias = _own(payload, spec)
        bias += _read(self.bias, bias.device) * self.scaling
        return bias


def sort_tensors(
    tensors: Iterable[StoredTensor], where: str
) -> tuple[list[Lora], dict[str, StoredTensor]]:
    """The matrices by module, and the tensors that replace one of the base, by name.

    Raises `SourceError` if something else is in the file, which ``where`` names.
    """
    parts: dict[str, dict[str, StoredTensor]] = {}
    replaced: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tensor.spec.name.removeprefix(_PREFIX)
        match = _PART.fullmatch(name)
        if match:
            kind = match["kind"].removesuffix(".weight")
            parts.setdefault(match["module"], {})[kind] = tensor
        elif _FOREIGN.search(name):
            raise SourceError(f"{where}: {shown(tensor.spec.name)} is nothing that can be merged")
        else:
            replaced[name.replace(".base_layer.", ".")] = tensor
    return [_lora(module, found, where) for module, found in parts.items()], replaced


def _lora(module: str, found: dict[str, StoredTensor], where: str) -> Lora:
    embedding = any(kind.startswith("lora_embedding") for kind in found)
    infix = "embedding_" if embedding else ""
    a, b = found.pop(f"lora_{infix}A", None), found.pop(f"lora_{infix}B", None)
    magnitude, bias = found.pop("lora_magnitude_vector", None), found.pop("lora_B.bias", None)
    if a is None or b is None or found or (embedding and (magnitude or bias)):
        raise SourceError(
            f"{where}: {shown(module)} needs a pair of A and B, and nothing that is not known here"
        )
    shapes = [a.spec.shape, b.spec.shape]
    if [len(shape) for shape in shapes] != [2, 2] or a.spec.shape[0] != b.spec.shape[1]:
        raise SourceError(
            f"{where}: {shown(module)} has A {list(shapes[0])} and B {list(shapes[1])}, which are "
            "no two matrices of one rank"
        )
    for tensor in filter(None, (a, b, magnitude, bias)):
        if tensor.spec.dtype not in CAST_DTYPES:
            raise SourceError(
                f"{where}: {shown(tensor.spec)} is no plain float, which a merge needs: load the "
                "adapter with PEFT, and save it in float32"
            )
    if (a.spec.dtype == torch.float64) != (b.spec.dtype == torch.float64):
        raise SourceError(
            f"{where}: {shown(module)} has A in {a.spec.dtype_name} and B in "
            f"{b.spec.dtype_name}, which cannot be multiplied: save the adapter in one dtype"
        )
    return Lora(module, a, b, embedding, magnitude, bias)


def orient(lora: Lora, stored: tuple[int, ...], square: bool) -> Lora:
    """``lora`` as it fits a weight of the shape ``stored``; ``square`` decides if both ways fit.

    Raises `SourceError` if it does not fit.
    """
    straight = stored == lora.shape
    turned = stored == lora.shape[::-1]
    if lora.embedding and turned:
        return replace(lora, transposed=True)
    if lora.embedding or not (straight or turned):
        raise SourceError(
            f"{shown(lora.module)}.weight is {list(stored)} in the base, and the adapter is for "
            f"{list(lora.shape[::-1] if lora.embedding else lora.shape)}: give the base that it "
            "was trained on"
        )
    return replace(lora, transposed=square if straight and turned else turned)


def _own(payload: Payload, spec: TensorSpec) -> torch.Tensor:
    return payload.clone() if isinstance(payload, torch.Tensor) else read_tensor(payload, spec)


def _read(stored: StoredTensor, device: torch.device) -> torch.Tensor:
    """A tensor of the adapter, in float32 if it is a shorter float, as PEFT loads it."""
    tensor = read_tensor(stored, stored.spec).to(device)
    return tensor.float() if tensor.dtype in _HALF else tensor


def _turned(tensor: torch.Tensor, turn: bool) -> torch.Tensor:
    return tensor.T if turn else tensor
