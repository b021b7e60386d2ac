"""The native model: a decoder built from an `Architecture`. One class for all families."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core.batch import ModelBatch
from core.model.arch import Architecture, read_architecture
from core.model.ceilings import roofline_of
from core.model.interface import AttentionSpec, Linear, ModelContext
from core.model.layers import DecoderLayer, RMSNorm
from core.model.loader import Loader, WeightLoader, WeightPart
from core.model.model_settings import NativeSettings
from core.model.roofline import Roofline
from core.model.rope import Rope
from core.model.weights import open_weights

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"


class NativeModel:
    """llama, mistral, qwen2, qwen3, gemma2 and gemma3 text models. See `core.model.interface.Model`.

    Raises ConfigError for a config it has no plan for, ModelFileError for weights that do not fit the plan.
    """

    Settings = NativeSettings

    def __init__(self, settings: NativeSettings, context: ModelContext):
        arch = read_architecture(context.spec.config, settings.ignore_config_keys)
        self.architecture: Architecture = arch
        self._attention = context.attention
        self._dtype = context.dtype
        self.ropes = tuple(Rope(plan, context.device) for plan in arch.ropes)
        self._load(self._loader(context), context)

    def _loader(self, context: ModelContext) -> Loader:
        return WeightLoader(open_weights(context.spec.files), context)

    def _load(self, loader: Loader, context: ModelContext) -> None:
        arch = self.architecture
        self.embedding = self._load_embedding(loader)
        self.layers = tuple(DecoderLayer(plan, arch, loader, context) for plan in arch.layers)
        self.norm = RMSNorm.load(loader, "model.norm", arch)
        self.head = self._load_head(loader)
        loader.finish(arch.tied_embeddings)

    def _load_embedding(self, loader: Loader) -> Tensor:
        return loader.tensor(f"{EMBEDDING}.weight", (self.architecture.vocab_size, self.architecture.hidden_size))

    def _load_head(self, loader: Loader) -> Linear:
        arch = self.architecture
        part = WeightPart(EMBEDDING if arch.tied_embeddings else LM_HEAD, arch.vocab_size)
        tied = self.embedding if arch.tied_embeddings and len(self.embedding) else None
        return loader.linear(LM_HEAD, (part,), arch.hidden_size, bias=False, tied=tied)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(plan.attention for plan in self.architecture.layers)

    def forward(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        """Tensors over the T and R axes are on the model's device. Returns logits float32 [R, V]."""
        metadata = self._attention.prepare(batch, self.attention_specs)
        rotations = [rope.at(batch.positions) for rope in self.ropes]
        x = F.embedding(batch.input_ids, self.embedding).float() * self.architecture.embedding_scale
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rotations[layer.rope], kv_cache, metadata)
        return self._logits(x[batch.logits_indices])

    def roofline(self) -> Roofline:
        """Of weights in the model's dtype; a weight format of fewer bits moves less."""
        return roofline_of(self.architecture, self._dtype, self.embedding.device)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x).to(self._dtype)).float()
        cap = self.architecture.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
