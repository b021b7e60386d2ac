"""Rotary position embeddings: what a config says about them, their frequencies, and the rotation.

RoPE: Su et al. 2021 (arXiv:2104.09864). Kinds of scaling and their keys are those of transformers' `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from core.model.layer_kinds import FULL, SLIDING

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_YARN_KEYS = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
_LLAMA3_KEYS = frozenset({"low_freq_factor", "high_freq_factor"})
_KEYS_OF_TYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": _COMMON_KEYS,
        "linear": _COMMON_KEYS | {"factor"},
        "llama3": _COMMON_KEYS | _LLAMA3_KEYS | {"factor", "original_max_position_embeddings"},
        "yarn": _COMMON_KEYS | _YARN_KEYS | {"factor", "original_max_position_embeddings"},
    }
)


@dataclass(frozen=True, slots=True)
class RopePlan:
    """One set of rotary frequencies. Names as in `rope_parameters`; fields of other kinds keep their defaults."""

    rope_type: str
    head_dim: int
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin


def rope_plans(
    config: Mapping[str, Any], head_dim: int, local_theta: float | None = None
) -> dict[str, RopePlan | None]:
    """Attention kind -> plan, for a config in the old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) form.

    `local_theta`: sliding layers have their own unscaled RoPE, with this base unless the config says otherwise.
    A kind whose parameters are null has no plan. Raises ConfigError naming the key that is wrong or unsupported.
    """
    return {
        kind: None if values is None else _plan(values, config, head_dim)
        for kind, values in _values_by_kind(config, local_theta).items()
    }


def _values_by_kind(config: Mapping[str, Any], local_theta: float | None) -> dict[str, dict[str, Any] | None]:
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config key {key}: must be a mapping, got {type(value).__name__}")
    if FULL in parameters or SLIDING in parameters:
        by_kind = {kind: dict(parameters[kind]) if parameters.get(kind) else None for kind in (FULL, SLIDING)}
    elif local_theta is None:
        shared = {"rope_theta": config.get("rope_theta", 10_000.0), **(parameters or scaling)}
        by_kind = {FULL: shared, SLIDING: shared}
    elif parameters:
        raise ConfigError(f"config key rope_parameters: this model needs one entry each for {FULL} and {SLIDING}")
    else:
        local = {"rope_theta": config.get("rope_local_base_freq", local_theta)}
        by_kind = {FULL: {"rope_theta": config.get("rope_theta", 1_000_000.0), **scaling}, SLIDING: local}
    _check_agreement(scaling, by_kind[FULL])
    return by_kind


def _check_agreement(scaling: Mapping[str, Any], chosen: Mapping[str, Any] | None) -> None:
    """Some writers put both forms into one file; they may not disagree."""
    for key, value in scaling.items():
        names = ("rope_type", "type") if key in ("rope_type", "type") else (key,)
        stated = [chosen[name] for name in names if chosen and name in chosen]
        if value not in stated:
            raise ConfigError(f"config keys rope_scaling and rope_parameters disagree on {key}: keep one of the two")


def _plan(values: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> RopePlan:
    rope_type = str(values.get("rope_type", values.get("type", "default")))
    known = _KEYS_OF_TYPE.get(rope_type)
    if known is None:
        raise ConfigError(
            f"config key rope_parameters.rope_type: {rope_type!r} is not supported by model=native "
            f"(supported: {', '.join(sorted(_KEYS_OF_TYPE))}); use model=transformers"
        )
    for key, value in values.items():
        if key not in known and value is not None:
            raise ConfigError(f"config key rope_parameters.{key}: not supported with rope_type {rope_type!r}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(
            f"config key partial_rotary_factor: {partial} is not supported by model=native; use model=transformers"
        )
    plan = RopePlan(rope_type, head_dim, _number(values, "rope_theta", 10_000.0))
    return plan if rope_type == "default" else _scaled(plan, values, config)


def _scaled(plan: RopePlan, values: Mapping[str, Any], config: Mapping[str, Any]) -> RopePlan:
    factor = _number(values, "factor")
    if plan.rope_type == "linear":
        return RopePlan("linear", plan.head_dim, plan.theta, factor)
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = original or config.get("max_position_embeddings")
    if not isinstance(original, int) or original < 1:
        raise ConfigError(
            "config key rope_parameters.original_max_position_embeddings: missing or not a positive integer"
        )
    if plan.rope_type == "llama3":
        low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
        if high <= low:
            raise ConfigError(f"config key rope_parameters.high_freq_factor: {high} must exceed low_freq_factor {low}")
        return RopePlan("llama3", plan.head_dim, plan.theta, factor, original, low, high)
    return RopePlan(
        "yarn",
        plan.head_dim,
        plan.theta,
        factor,
        original,
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"config key rope_parameters.{key}: must be a positive number, got {value!r}")
    return float(value)


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, eq. 22); the mscale pair is DeepSeek's."""
    if values.get("attention_factor") is not None:
        return _number(values, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(_number(values, "mscale")) / mscale(_number(values, "mscale_all_dim"))
    return mscale(1.0)


def inverse_frequencies(plan: RopePlan) -> Tensor:
    """Radians per position, float32 [head_dim / 2], with the plan's scaling."""
    exponents = torch.arange(0, plan.head_dim, 2, dtype=torch.float32) / plan.head_dim
    frequencies = 1.0 / (plan.theta**exponents)
    if plan.rope_type == "linear":
        return frequencies / plan.factor
    if plan.rope_type == "llama3":
        return frequencies * _blend(_llama3_kept(plan, frequencies), plan.factor)
    if plan.rope_type == "yarn":
        return frequencies * _blend(_yarn_kept(plan), plan.factor)
    return frequencies


def _blend(kept: Tensor, factor: float) -> Tensor:
    """Multiplier of a frequency of which the share `kept` stays as it is and the rest is divided by `factor`."""
    return (1 - kept) / factor + kept


def _llama3_kept(plan: RopePlan, frequencies: Tensor) -> Tensor:
    """Short wavelengths are kept, long ones scaled, those between blended (Llama 3.1 model card)."""
    turns = plan.original_max_position_embeddings * frequencies / (2 * math.pi)
    return ((turns - plan.low_freq_factor) / (plan.high_freq_factor - plan.low_freq_factor)).clamp(0, 1)


def _yarn_kept(plan: RopePlan) -> Tensor:
    """Dimensions that turn more than beta_fast times over the original context are kept (YaRN, section 3.2)."""

    def dimension(turns: float) -> float:
        ratio = plan.original_max_position_embeddings / (turns * 2 * math.pi)
        return plan.head_dim * math.log(ratio) / (2 * math.log(plan.theta))

    low, high = dimension(plan.beta_fast), dimension(plan.beta_slow)
    if plan.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, plan.head_dim - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(plan.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one batch, float32 [T, 1, head_dim]; the first half of `sin` carries the minus of the rotation."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x float32 [T, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin)


class Rope:
    """Makes the rotation of a batch from its positions: no table, so memory does not grow with the context length."""

    def __init__(self, plan: RopePlan, device: torch.device):
        self.frequencies = inverse_frequencies(plan).to(device)
        self.scale = plan.attention_factor

    def at(self, positions: Tensor) -> Rotation:
        """`positions` int64 [T], on the model's device."""
        angles = positions.to(torch.float32)[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
