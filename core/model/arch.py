"""A model described by data: Hugging Face config dict -> `Architecture`, the frozen record a decoder is built from.

A family is a row of facts, not a class. A config key that the row does not know, and that is switched on, is refused by
name: a key that changes the maths is never ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import ConfigError
from core.model.families import COMMON_KEYS, FAMILIES, NEUTRAL_KEYS, NEUTRAL_PREFIXES, NEUTRAL_SUFFIXES, Family
from core.model.interface import AttentionSpec
from core.model.layer_kinds import SLIDING, ConfigValues, layer_kinds, sliding_window
from core.model.rope import RopePlan, rope_plans

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One decoder layer. Sizes in elements."""

    name: str  # Hugging Face prefix: model.layers.0
    attention: AttentionSpec
    rope: int  # index into Architecture.ropes
    norms: Literal["pre", "sandwich"]  # sandwich: the outputs of attention and MLP are normalised too
    qk_norm: bool  # RMSNorm over each query and key head
    activation: Activation
    intermediate_size: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only language model: everything of its config that changes the maths."""

    model_type: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    norm_offset: float  # added to stored norm weights; 1 where they are stored as w - 1
    embedding_scale: float
    final_softcap: float | None
    tied_embeddings: bool
    ropes: tuple[RopePlan, ...]
    layers: tuple[LayerPlan, ...]


def read_architecture(config: Mapping[str, Any], ignored_keys: Collection[str] = ()) -> Architecture:
    """The plan of a model from its config (old or new key spellings).

    Raises ConfigError naming the model type or key that is missing, malformed or unsupported.
    """
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} has no native plan (there are: {', '.join(sorted(FAMILIES))}); "
            "use model=transformers, which runs what the transformers library supports"
        )
    _refuse_unknown_keys(config, family, ignored_keys)
    fields = ConfigValues({**family.defaults, **{key: config[key] for key in config if key not in ignored_keys}})
    heads = fields.positive_int("num_attention_heads")
    head_dim = fields.optional_int("head_dim") or fields.positive_int("hidden_size") // heads
    if head_dim % 2:
        raise ConfigError(f"config key head_dim: {head_dim} is odd, which RoPE cannot halve")
    kinds = layer_kinds(fields, family)
    plans = rope_plans(fields.values, head_dim, family.local_theta)
    ropes = _distinct_ropes(plans, kinds)
    return Architecture(
        model_type=model_type,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        norm_offset=1.0 if family.gemma else 0.0,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5 if family.gemma else 1.0,
        final_softcap=fields.optional_float("final_logit_softcapping"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        ropes=ropes,
        layers=tuple(
            _layer(fields, family, index, kind, heads, head_dim, ropes.index(_rope_of(plans, kind)))
            for index, kind in enumerate(kinds)
        ),
    )


def _refuse_unknown_keys(config: Mapping[str, Any], family: Family, ignored_keys: Collection[str]) -> None:
    known = COMMON_KEYS | NEUTRAL_KEYS | family.keys
    for key, value in config.items():
        if key in known or key in ignored_keys or not value:
            continue
        if not key.startswith(NEUTRAL_PREFIXES) and not key.endswith(NEUTRAL_SUFFIXES):
            raise ConfigError(
                f"config key {key}={value!r} is not understood for model_type {config['model_type']!r}; use "
                f"model=transformers, or model.ignore_config_keys=[{key}] if it does not change what the model computes"
            )


def _rope_of(plans: Mapping[str, RopePlan | None], kind: str) -> RopePlan:
    plan = plans[kind]
    if plan is None:
        raise ConfigError(f"config key rope_parameters.{kind}: missing, and layers without RoPE are not supported")
    return plan


def _distinct_ropes(plans: Mapping[str, RopePlan | None], kinds: tuple[str, ...]) -> tuple[RopePlan, ...]:
    return tuple(dict.fromkeys(_rope_of(plans, kind) for kind in kinds))


def _layer(
    fields: ConfigValues, family: Family, index: int, kind: str, heads: int, head_dim: int, rope: int
) -> LayerPlan:
    bias = fields.flag("attention_bias")
    activation = str(fields.values.get("hidden_activation" if family.gemma else "hidden_act") or "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"config key hidden_act: {activation!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    return LayerPlan(
        name=f"model.layers.{index}",
        attention=_attention(fields, family, index, kind, heads, head_dim),
        rope=rope,
        norms="sandwich" if family.gemma else "pre",
        qk_norm=family.qk_norm,
        activation=ACTIVATIONS[activation],
        intermediate_size=fields.positive_int("intermediate_size"),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias and family.qkv_bias is None,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _attention(fields: ConfigValues, family: Family, index: int, kind: str, heads: int, head_dim: int) -> AttentionSpec:
    kv_heads = fields.optional_int("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"config key num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    window = sliding_window(fields, family) if kind == SLIDING else None
    if kind == SLIDING and window is None:
        raise ConfigError(f"config key layer_types: layer {index} slides, but sliding_window is off")
    scale_of = fields.positive_float("query_pre_attn_scalar", head_dim) if family.gemma else head_dim
    return AttentionSpec(
        layer=index,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale_of**-0.5,
        sliding_window=window,
        softcap=fields.optional_float("attn_logit_softcapping") if family.gemma else None,
    )
