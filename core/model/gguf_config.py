"""GGUF metadata -> the dictionary that the model's Hugging Face config.json would hold.

Both spellings of RoPE settings are written: `rope_theta` with `rope_scaling` (and Gemma 3's `rope_local_base_freq`), and
the `rope_parameters` of transformers 5. Values that GGUF does not store follow llama.cpp's readings of the same files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from core.errors import ModelFileError
from core.model.gguf import GGUFFile, TensorInfo
from core.model.gguf_fields import MetadataFields
from core.model.gguf_weights import (
    GGUFWeight,
    WeightTransform,
    file_weights,
    head_counts,
    model_type_of,
    read_hf_tensor,
    weight_map,
)

__all__ = [
    "GGUFWeight",
    "WeightTransform",
    "file_weights",
    "hf_config",
    "read_hf_config",
    "read_hf_tensor",
    "weight_map",
]

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA2_WINDOW = 4096  # of files made before the key was written
_GEMMA3_LOCAL_THETA = 10_000.0
_ROPE_FACTORS = "rope_freqs.weight"
# The 27B variants scale queries by hidden_size / heads instead of head_dim; GGUF tells them apart by depth alone.
_LAYERS_OF_27B: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3_text": 62})
_SLIDING_PERIOD: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3_text": 6})


@dataclass(frozen=True, slots=True)
class _Sizes:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def read_hf_config(file: GGUFFile) -> dict[str, Any]:
    """`hf_config` of an open file, plus llama3 RoPE scaling, whose parameters lie in a tensor and not in metadata."""
    config = hf_config(file.metadata, file.tensors, source=str(file.path))
    if _ROPE_FACTORS in file.tensors:
        scaling = _llama3_scaling(file, config)
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
    return config


def hf_config(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo], source: str = "GGUF metadata"
) -> dict[str, Any]:
    """Hugging Face style config of a llama, mistral, qwen2, qwen3, gemma2 or gemma3 file.

    Raises ModelFileError naming `source` and the key for a missing, mistyped, out-of-range or unsupported value.
    """
    fields = MetadataFields(metadata, source)
    model_type = model_type_of(fields)
    arch = fields.text("general.architecture")
    if fields.optional_integer(f"{arch}.expert_count"):
        fields.fail(f"{arch}.expert_count", "mixture-of-experts models are not supported")
    sizes = _sizes(fields, arch)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[model_type]],
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": fields.integer(f"{arch}.feed_forward_length", low=1),
        "vocab_size": _vocab_size(fields, arch, tensors),
        "max_position_embeddings": fields.integer(f"{arch}.context_length", low=1),
        "rms_norm_eps": _rms_norm_eps(fields, arch),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        **_activation(model_type),
        **_special_ids(fields),
    }
    _add_sliding_window(config, fields, arch)
    _add_rope(config, fields, arch)
    if model_type.startswith("gemma"):
        _add_gemma(config, fields, arch, sizes)
    return config


def _sizes(fields: MetadataFields, arch: str) -> _Sizes:
    hidden = fields.integer(f"{arch}.embedding_length", low=1)
    layers = fields.integer(f"{arch}.block_count", low=1, high=10_000)
    heads, kv_heads = head_counts(fields)
    head_dim = fields.optional_integer(f"{arch}.attention.key_length", low=1) or hidden // heads
    value_dim = fields.optional_integer(f"{arch}.attention.value_length", low=1) or head_dim
    if value_dim != head_dim:
        fields.fail(f"{arch}.attention.value_length", f"{value_dim} differs from the key length {head_dim}")
    if head_dim < 2 or head_dim % 2:
        fields.fail(f"{arch}.attention.head_count", f"gives heads of {head_dim}, which RoPE cannot halve")
    rotated = fields.optional_integer(f"{arch}.rope.dimension_count") or head_dim
    if rotated != head_dim:
        fields.fail(f"{arch}.rope.dimension_count", f"{rotated} of {head_dim}: partial RoPE is not supported")
    return _Sizes(hidden, layers, heads, kv_heads, head_dim)


def _vocab_size(fields: MetadataFields, arch: str, tensors: Mapping[str, TensorInfo]) -> int:
    """The width of the logits: rows of the embedding, which may exceed the number of tokens."""
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    declared = fields.optional_integer(f"{arch}.vocab_size", low=1)
    return declared or len(fields.texts("tokenizer.ggml.tokens"))


def _rms_norm_eps(fields: MetadataFields, arch: str) -> float:
    """Stored as float32; six digits bring back the decimal that was meant (1e-05, not 9.99999974e-06)."""
    return float(f"{fields.number(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}")


def _activation(model_type: str) -> dict[str, str]:
    if model_type.startswith("gemma"):
        return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return {"hidden_act": "silu"}


def _special_ids(fields: MetadataFields) -> dict[str, int | None]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: fields.optional_integer(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in keys.items()}


def _add_sliding_window(config: dict[str, Any], fields: MetadataFields, arch: str) -> None:
    """`sliding_window` is None for full attention; `layer_types` says which layers slide."""
    layers, model_type = config["num_hidden_layers"], config["model_type"]
    window = fields.optional_integer(f"{arch}.attention.sliding_window") or None
    if window is None and model_type == "gemma2":
        window = _GEMMA2_WINDOW
    if model_type.startswith("qwen"):
        window = None  # GGUF does not store which Qwen layers slide, and the released models slide none
    if window is None:
        sliding = [False] * layers
    elif model_type in _SLIDING_PERIOD:
        sliding = _sliding_layers(fields, arch, layers, _SLIDING_PERIOD[model_type])
    else:
        sliding = [True] * layers
    config["sliding_window"] = window
    config["layer_types"] = [_SLIDING if slides else _FULL for slides in sliding]


def _sliding_layers(fields: MetadataFields, arch: str, layers: int, default_period: int) -> list[bool]:
    """One flag per layer. The pattern is a period (every n-th layer is global) or an array of flags."""
    key = f"{arch}.attention.sliding_window_pattern"
    if isinstance(fields.metadata.get(key), tuple):
        flags = fields.flags(key)
        if len(flags) < layers:
            fields.fail(key, f"has {len(flags)} entries for {layers} layers")
        return list(flags[:layers])
    period = fields.optional_integer(key, low=1) or default_period
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _add_rope(config: dict[str, Any], fields: MetadataFields, arch: str) -> None:
    theta = fields.number(f"{arch}.rope.freq_base", 10_000.0)
    scaling = _rope_scaling(fields, arch)
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    config["rope_theta"] = theta
    config["rope_scaling"] = scaling
    config["rope_parameters"] = parameters
    if config["model_type"] == "gemma3_text":
        local = fields.number(f"{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {_FULL: parameters, _SLIDING: {"rope_theta": local, "rope_type": "default"}}


def _rope_scaling(fields: MetadataFields, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = fields.optional_text(f"{prefix}.type")
    if kind is None and f"{arch}.rope.scale_linear" in fields:
        factor = fields.number(f"{arch}.rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind is None or kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        fields.fail(f"{prefix}.type", f"{kind} is not supported (none, linear and yarn are)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(f"{prefix}.factor")}
    original = fields.optional_integer(f"{prefix}.original_context_length", low=1)
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _add_gemma(config: dict[str, Any], fields: MetadataFields, arch: str, sizes: _Sizes) -> None:
    """Soft caps and the query scale. Gemma 2 files may omit caps: its models all use 50 and 30."""
    has_caps = config["model_type"] == "gemma2"
    for ours, theirs, usual in (
        ("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", "final_logit_softcapping", 30.0),
    ):
        key = f"{arch}.{theirs}"
        config[ours] = fields.number(key, usual) if has_caps or key in fields else None
    of_27b = sizes.layers == _LAYERS_OF_27B[config["model_type"]]
    config["query_pre_attn_scalar"] = sizes.hidden // sizes.heads if of_27b else sizes.head_dim


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the llama3 parameters whose factors are those of the file (Llama 3.1 to 3.3 differ in `factor` alone)."""
    factors = file.floats(_ROPE_FACTORS)
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    finite = len(factors) == config["head_dim"] // 2 and all(0 < factor < math.inf for factor in factors)
    if not finite or not _close(factors, llama3_factors(config["head_dim"], config["rope_theta"], scaling)):
        raise ModelFileError(
            f"{file.path}: {_ROPE_FACTORS}: holds RoPE factors that are not Llama 3's; such scaling is not supported"
        )
    return scaling


def _close(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(value, other, rel_tol=1e-3) for value, other in zip(values, expected, strict=True))


def llama3_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Divisors of the RoPE frequencies, [head_dim / 2] (Llama 3.1 model card, `rope_scaling`).

    Long wavelengths are divided by `factor`, short ones kept, and those between blended linearly in 1 / wavelength.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (exponent / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return tuple(divisors)
