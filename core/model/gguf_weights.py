"""Hugging Face tensor names over a GGUF file: which tensor holds a weight, and what undoes the conversion.

llama.cpp's converter stores q and k of the llama family with rows reordered for interleaved RoPE, and Gemma's norm
weights with 1 added (https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf). Both are undone here, so a model reads
the same numbers from either kind of file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from core.errors import ModelFileError, near_matches
from core.model.gguf import GGUFFile
from core.model.gguf_fields import MetadataFields

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightTransform(Enum):
    NONE = "none"
    UNPERMUTE_Q = "unpermute_q"  # rows of query heads: interleaved pairs back to half and half
    UNPERMUTE_K = "unpermute_k"  # the same over key/value heads
    MINUS_ONE = "minus_one"  # a norm weight stored as 1 + w


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """Where a Hugging Face tensor lies in the file. `optional`: models of the same family exist without it."""

    name: str
    transform: WeightTransform = WeightTransform.NONE
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between the supported architectures."""

    interleaved_rope: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False  # norms after attention and after the feed-forward too
    qk_norm: bool = False
    attention_bias: bool = False  # whether q, k, v may carry a bias


_LLAMA = _Family(interleaved_rope=True, attention_bias=True)
FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _Family(attention_bias=True),
        "qwen3": _Family(qk_norm=True, attention_bias=True),
        "gemma2": _Family(norm_plus_one=True, sandwich_norms=True),
        "gemma3_text": _Family(norm_plus_one=True, sandwich_norms=True, qk_norm=True),
    }
)

_LM_HEAD, _EMBEDDING = "lm_head.weight", "token_embd.weight"
_PROJECTIONS = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@cache
def weight_map(model_type: str, num_layers: int) -> Mapping[str, GGUFWeight]:
    """Hugging Face tensor name -> GGUFWeight, in layer order, for a Hugging Face `model_type`.

    Raises ModelFileError for a model type that has no map. `lm_head.weight` is optional: tied models lack it.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelFileError(f"model_type: {model_type} has no GGUF weight map{near_matches(model_type, FAMILIES)}")
    norm = WeightTransform.MINUS_ONE if family.norm_plus_one else WeightTransform.NONE
    weights = {"model.embed_tokens.weight": GGUFWeight(_EMBEDDING)}
    for layer in range(num_layers):
        for name, weight in _layer_weights(family, norm).items():
            stored = GGUFWeight(f"blk.{layer}.{weight.name}", weight.transform, weight.optional)
            weights[f"model.layers.{layer}.{name}"] = stored
    weights["model.norm.weight"] = GGUFWeight("output_norm.weight", norm)
    weights[_LM_HEAD] = GGUFWeight("output.weight", optional=True)
    return MappingProxyType(weights)


def _layer_weights(family: _Family, norm: WeightTransform) -> dict[str, GGUFWeight]:
    weights = {f"{ours}.weight": GGUFWeight(f"{theirs}.weight") for ours, theirs in _PROJECTIONS.items()}
    none = WeightTransform.NONE
    q_rows, k_rows = (
        (WeightTransform.UNPERMUTE_Q, WeightTransform.UNPERMUTE_K) if family.interleaved_rope else (none, none)
    )
    weights["self_attn.q_proj.weight"] = GGUFWeight("attn_q.weight", q_rows)
    weights["self_attn.k_proj.weight"] = GGUFWeight("attn_k.weight", k_rows)
    if family.attention_bias:
        weights["self_attn.q_proj.bias"] = GGUFWeight("attn_q.bias", q_rows, optional=True)
        weights["self_attn.k_proj.bias"] = GGUFWeight("attn_k.bias", k_rows, optional=True)
        for ours, theirs in _PROJECTIONS.items():
            weights[f"{ours}.bias"] = GGUFWeight(f"{theirs}.bias", optional=True)
    return weights | {name: GGUFWeight(stored, norm) for name, stored in _norm_names(family).items()}


def _norm_names(family: _Family) -> dict[str, str]:
    names = {"input_layernorm.weight": "attn_norm.weight"}
    if family.sandwich_norms:
        names["post_attention_layernorm.weight"] = "post_attention_norm.weight"
        names["pre_feedforward_layernorm.weight"] = "ffn_norm.weight"
        names["post_feedforward_layernorm.weight"] = "post_ffw_norm.weight"
    else:
        names["post_attention_layernorm.weight"] = "ffn_norm.weight"
    if family.qk_norm:
        names["self_attn.q_norm.weight"] = "attn_q_norm.weight"
        names["self_attn.k_norm.weight"] = "attn_k_norm.weight"
    return names


def model_type_of(fields: MetadataFields) -> str:
    """Hugging Face `model_type` of the file. Mistral is stored as llama; only a sliding window tells them apart."""
    arch = fields.text("general.architecture")
    if arch == "llama":
        return "mistral" if "llama.attention.sliding_window" in fields else "llama"
    model_type = "gemma3_text" if arch == "gemma3" else arch
    if model_type not in FAMILIES or arch == "gemma3_text":
        known = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
        fields.fail("general.architecture", f"{arch} is not supported{near_matches(arch, known)}")
    return model_type


def head_counts(fields: MetadataFields) -> tuple[int, int]:
    """(query heads, key/value heads); per-layer arrays are accepted when all layers agree."""
    arch = fields.text("general.architecture")
    heads = _uniform_count(fields, f"{arch}.attention.head_count")
    kv_key = f"{arch}.attention.head_count_kv"
    kv_heads = _uniform_count(fields, kv_key) if kv_key in fields else heads
    if heads % kv_heads:
        fields.fail(kv_key, f"{kv_heads} does not divide the {heads} attention heads")
    return heads, kv_heads


def _uniform_count(fields: MetadataFields, key: str) -> int:
    value = fields.require(key)
    if not isinstance(value, tuple):
        return fields.integer(key, low=1)
    counts = set(fields.integers(key))
    if len(counts) != 1 or min(counts) < 1:
        fields.fail(key, "differs between layers, which is not supported")
    return counts.pop()


def file_weights(file: GGUFFile) -> Mapping[str, GGUFWeight]:
    """The weight map of this file, less the optional tensors that it lacks.

    A tied file still has `lm_head.weight`: it maps to the embedding.
    """
    fields = MetadataFields(file.metadata, str(file.path))
    arch = fields.text("general.architecture")
    num_layers = fields.integer(f"{arch}.block_count", low=1, high=10_000)
    present = {}
    for name, weight in weight_map(model_type_of(fields), num_layers).items():
        if weight.name in file.tensors or not weight.optional:
            present[name] = weight
        elif name == _LM_HEAD:
            present[name] = GGUFWeight(_EMBEDDING)
    return MappingProxyType(present)


def read_hf_tensor(file: GGUFFile, hf_name: str, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that a Hugging Face checkpoint calls `hf_name`, dequantised to `dtype` (float32), conversion undone.

    Raises ModelFileError when the file does not hold it.
    """
    weight = _stored(file, hf_name)
    if weight.transform is WeightTransform.MINUS_ONE:
        plain = file.read(weight.name) - 1  # in float32, before any rounding
        return plain if dtype is None else plain.to(dtype)
    return _rows_in_order(file, weight, file.read(weight.name, dtype))


def read_hf_blocks(file: GGUFFile, hf_name: str) -> Tensor | None:
    """The same weight as the file has it, uint8 [rows, row_bytes], conversion undone; None where it is not in blocks."""
    weight = _stored(file, hf_name)
    info = file.info(weight.name)
    if info.block_format.block_size == 1 or weight.transform is WeightTransform.MINUS_ONE or len(info.shape) != 2:
        return None
    return _rows_in_order(file, weight, file.raw(weight.name).view(info.shape[0], -1))


def _stored(file: GGUFFile, hf_name: str) -> GGUFWeight:
    weights = file_weights(file)
    weight = weights.get(hf_name)
    if weight is None:
        raise ModelFileError(
            f"{file.path}: tensor {hf_name}: is not part of this model{near_matches(hf_name, weights)}"
        )
    return weight


def _rows_in_order(file: GGUFFile, weight: GGUFWeight, stored: Tensor) -> Tensor:
    """Rows as Hugging Face has them. Raises ModelFileError where they do not divide into heads."""
    if weight.transform is WeightTransform.NONE:
        return stored
    heads, kv_heads = head_counts(MetadataFields(file.metadata, str(file.path)))
    groups = heads if weight.transform is WeightTransform.UNPERMUTE_Q else kv_heads
    if stored.shape[0] % (2 * groups):
        raise ModelFileError(
            f"{file.path}: tensor {weight.name}: {stored.shape[0]} rows do not divide into {groups} heads"
        )
    return unpermute_rows(stored, groups)


def unpermute_rows(weight: Tensor, num_heads: int) -> Tensor:
    """[heads * head_dim, ...] with RoPE pairs side by side (2i, 2i+1) -> the pair of row i at i + head_dim / 2."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
