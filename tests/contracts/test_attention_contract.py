"""The built-in attention backends keep the contract that third parties test theirs with."""

from __future__ import annotations

from core.model.interface import AttentionBackend, AttentionContext
from core.testing.attention import AttentionContract
from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TorchSdpa


class TestTorchSdpa(AttentionContract):
    def make_backend(self, context: AttentionContext) -> AttentionBackend:
        return TorchSdpa(TorchSdpaSettings(), context)
