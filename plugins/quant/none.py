"""Weights as they are: one dense matrix in the model's dtype."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from core.model.interface import Linear, QuantContext
from plugins.quant.settings import DenseSettings


class Dense:
    """The slow twin of every quantized format."""

    Settings = DenseSettings

    def __init__(self, settings: DenseSettings, context: QuantContext):
        self._context = context

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Keeps `weight` itself when it already has the right dtype and device."""
        device, dtype = self._context.device, self._context.dtype
        kept = None if bias is None else bias.to(device, dtype)
        return partial(F.linear, weight=weight.to(device, dtype), bias=kept)
