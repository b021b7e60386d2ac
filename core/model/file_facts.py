"""What a model file asks of the components, and its facts, from its description alone: no weight is read. Torch-free.

The words are those of `core.capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError
from core.model.families import FAMILIES
from core.model.layer_kinds import SLIDING, ConfigValues, layer_kinds
from core.model.spec import ModelSpec

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A fact that is missing in `values` is not known, and not checked."""

    requires: tuple[str, ...]  # group.word
    provides: tuple[str, ...]
    values: Mapping[str, tuple[Value, ...]]


def read_file_facts(spec: ModelSpec) -> FileFacts:
    """The facts of a model, whatever runs it."""
    text = spec.config.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, dict) else spec.config
    family = FAMILIES.get(str(config.get("model_type")))
    config = {**(family.defaults if family else {}), **config}
    slides, capped = _slides(config), bool(config.get("attn_logit_softcapping"))
    needs = {"attention.sliding_window": slides, "attention.softcap": capped}
    values: dict[str, tuple[Value, ...]] = {
        "model_type": (spec.model_type,),
        "file_kind": (spec.files.kind,),
        "sliding_window": (slides,),
        "softcap": (capped,),
    }
    if head_dim := _head_dim(config):
        values["head_dim"] = (head_dim,)
    if spec.weights:
        values["weights"] = spec.weights
    requires = tuple(word for word, needed in needs.items() if needed)
    return FileFacts(requires, ("tokenizer",) if _has_tokenizer(spec) else (), values)


def _has_tokenizer(spec: ModelSpec) -> bool:
    """A GGUF file without one is refused when its header is read."""
    return spec.files.kind != "hf" or (spec.files.path / "tokenizer.json").is_file()


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether any layer has a sliding window: exact for the families that have a plan, as the keys say for others."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None:
        try:
            return SLIDING in layer_kinds(ConfigValues(config), family)
        except (ConfigError, TypeError):
            pass  # whoever builds the model says what is wrong with it; model=transformers may not mind
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        return SLIDING in kinds
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """Elements of a query head; None where it cannot be told (latent attention has several sizes)."""
    given, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(given, int):
        return given
    if not isinstance(hidden, int) or not isinstance(heads, int) or any(key.endswith("_head_dim") for key in config):
        return None
    return hidden // heads if heads > 0 and hidden % heads == 0 else None
