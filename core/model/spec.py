"""What the pipeline needs to know about a model before its weights are read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. `kind` is "gguf" (one file) or "hf" (a folder with config.json and safetensors)."""

    kind: str
    path: Path
    source: str  # as the user wrote it: a path, hf:…, pypi:…


def quantization_of(config: Mapping[str, Any]) -> Any:
    """`quantization_config` of a config.json, of the whole or of its text model; None where the weights are dense."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Read from config.json or GGUF metadata.

    `vocab_size` is the width of the logits; ids in `unusable_token_ids` (padding rows without text) are never sampled.
    """

    name: str
    files: ModelFiles
    config: dict[str, Any]  # Hugging Face style config (for GGUF: made from its metadata)
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    unusable_token_ids: frozenset[int] = frozenset()
    generation_config: dict[str, Any] = field(default_factory=dict)
    weights: tuple[str, ...] = ()  # kinds: dense, block formats of GGUF (Q4_K …), a quant_method; (): unknown

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))
