"""The built-in attention backend keeps the contract, in 16-bit types too."""

from __future__ import annotations

from core.testing.attention import AttentionContract
from core.testing.suites import words_of
from plugins.attention.torch_sdpa import TorchSdpa


class TestTorchSdpa(AttentionContract):
    component = TorchSdpa
    provides = words_of("attention", "torch_sdpa")
