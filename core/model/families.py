"""What each supported model type fixes, one row per type, and which config keys are understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type fixes. `windows` says which layers slide when the config has no `layer_types`."""

    keys: frozenset[str] = frozenset()  # maths keys it reads beside the common ones
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that its config may leave out
    windows: Literal["none", "all", "upper", "periodic"] = "none"
    qkv_bias: bool | None = None  # None: as the key attention_bias says, for the output projection too
    qk_norm: bool = False
    gemma: bool = False  # (1 + w) norms, norms on both sides, scaled embedding, query_pre_attn_scalar
    local_theta: float | None = None  # sliding layers have a RoPE of their own


_QWEN_KEYS = frozenset({"attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"})
_GEMMA_KEYS = frozenset(
    {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }
)
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(keys=frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family(keys=frozenset({"sliding_window"}), defaults={"sliding_window": 4096}, windows="all"),
    "qwen2": Family(keys=_QWEN_KEYS, windows="upper", qkv_bias=True),
    "qwen3": Family(keys=_QWEN_KEYS, defaults={"head_dim": 128}, windows="upper", qk_norm=True),
    "gemma2": Family(
        keys=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        windows="periodic",
        gemma=True,
    ),
    "gemma3_text": Family(
        keys=_GEMMA_KEYS | {"rope_local_base_freq"},
        defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 6},
        windows="periodic",
        qk_norm=True,
        gemma=True,
        local_theta=10_000.0,
    ),
}

COMMON_KEYS = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "layer_types",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "quantization_config",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
    }
)
# Keys that say nothing about the maths of inference: bookkeeping, training, generation defaults, tokenizer ids.
NEUTRAL_KEYS = frozenset(
    {
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "initializer_range",
        "use_cache",
        "tokenizer_class",
        "pretraining_tp",
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "cache_implementation",
        "return_dict",
        "id2label",
        "label2id",
        "is_llama_config",
        "max_length",
        "min_length",
        "temperature",
        "top_k",
        "top_p",
        "do_sample",
        "num_beams",
        "repetition_penalty",
        "length_penalty",
        "torchscript",
        "gradient_checkpointing",
        "transformers.js_config",
        "auto_map",
    }
)
NEUTRAL_PREFIXES = ("_", "unsloth")
NEUTRAL_SUFFIXES = ("_token_id", "_token_ids")
