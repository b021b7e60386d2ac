"""Typed reads of a config, and which layers slide: what the front needs too, to know what attention must provide.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from core.model.families import Family

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 4096


class ConfigValues:
    """Typed reads of a config, with errors that name the key. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def positive_int(self, key: str) -> int:
        value = self.optional_int(key)
        if value is None:
            raise ConfigError(f"config key {key}: missing")
        return value

    def optional_int(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"config key {key}: must be a positive integer, got {value!r}")
        return value

    def positive_float(self, key: str, default: float) -> float:
        value = self.optional_float(key)
        return default if value is None else value

    def optional_float(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ConfigError(f"config key {key}: must be a positive number, got {value!r}")
        return None if value is None else float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config key {key}: must be true or false, got {value!r}")
        return bool(value)


def layer_kinds(fields: ConfigValues, family: Family) -> tuple[str, ...]:
    """Attention kind of each layer."""
    usual = _usual_kinds(fields, family)
    given = fields.values.get("layer_types")
    if given is None:
        return usual
    if not isinstance(given, list | tuple) or len(given) != len(usual) or set(given) - {FULL, SLIDING}:
        raise ConfigError(f"config key layer_types: needs {len(usual)} entries, each {FULL} or {SLIDING}")
    if family.windows in ("none", "all") and tuple(given) != usual:
        raise ConfigError("config key layer_types: layers of this model type cannot differ; use model=transformers")
    return tuple(given)


def _usual_kinds(fields: ConfigValues, family: Family) -> tuple[str, ...]:
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ConfigError(f"config key num_hidden_layers: {num_layers} is past the {MAX_LAYERS} that any model has")
    layers = range(num_layers)
    if family.windows == "none" or sliding_window(fields, family) is None:
        return tuple(FULL for _ in layers)
    if family.windows == "all":
        return tuple(SLIDING for _ in layers)
    if family.windows == "upper":
        first = fields.values.get("max_window_layers", 28)
        return tuple(SLIDING if layer >= first else FULL for layer in layers)
    period = fields.optional_int("_sliding_window_pattern") or fields.positive_int("sliding_window_pattern")
    return tuple(SLIDING if (layer + 1) % period else FULL for layer in layers)


def sliding_window(fields: ConfigValues, family: Family) -> int | None:
    """Qwen configs name a window that a second key switches on."""
    if "use_sliding_window" in family.keys and not fields.flag("use_sliding_window"):
        return None
    return fields.optional_int("sliding_window")
