"""The built-in models keep the contract, on families with and without a sliding window."""

from __future__ import annotations

from core.model.decoder import NativeModel
from core.testing.model import ModelContract
from plugins.models.transformers_model import TransformersModel


class TestNative(ModelContract):
    component = NativeModel


class TestNativeGemma(ModelContract):
    component = NativeModel
    family = "gemma3_text"


class TestTransformers(ModelContract):
    component = TransformersModel


class TestTransformersNeoX(ModelContract):
    """A family that the native model does not know."""

    component = TransformersModel
    family = "gpt_neox"
