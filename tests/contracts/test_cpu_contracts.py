"""The native CPU code keeps the contracts, with each set of instructions that this machine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from core.model.interface import AttentionContext, AttentionSpec, ModelContext, QuantContext
from core.model.spec import ModelSpec
from core.progress import no_progress
from core.testing import attention as testing_attention
from core.testing.attention import AttentionContract, Sequences, make_sequences
from core.testing.model import BLOCK_SIZE, CPU, ModelContract
from core.testing.quant import QuantContract
from core.testing.suites import words_of
from plugins.cpu import attention, library, model, quant
from plugins.cpu.attention import CpuPaged
from plugins.cpu.library import NoNativeCodeError
from plugins.cpu.model import CpuModel
from plugins.cpu.quant import Bfloat16, CpuQuant, Float32, Gguf, Int4, Int8, PackedLinear, TorchLinear
from plugins.cpu.settings import CpuQuantSettings


@contextmanager
def without_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, quant, model):
            patch.setattr(module, "available", lambda instructions: None)
        yield


def needs(instructions: str) -> dict[str, str]:
    try:
        library.load(instructions)
    except NoNativeCodeError as error:
        pytest.skip(str(error))
    return {"instructions": instructions}


class TestCpuPaged(AttentionContract):
    component = CpuPaged
    provides = words_of("attention", "cpu_paged")
    instructions: ClassVar[str] = "auto"
    settings: ClassVar[dict[str, str]] = {}

    def make(self, context: object) -> CpuPaged:
        return CpuPaged(CpuPaged.Settings(**needs(self.instructions), **self.settings), context)


class TestCpuPagedAvx2(TestCpuPaged):
    instructions = "avx2"


class TestCpuPagedPortable(TestCpuPaged):
    instructions = "portable"


class TestWithoutCompilerPaged(TestCpuPaged):
    """The slow twin."""

    def make(self, context: object) -> CpuPaged:
        with without_compiler():
            return super().make(context)


def on_grid(x: Tensor, limit: int) -> Tensor:
    """Of each head, numbers that are whole multiples of its largest one divided by `limit`."""
    most = x.float().abs().amax(-1, keepdim=True)
    return ((x.float() / most * limit).round() / limit * most).to(x.dtype)


class TestCpuPagedInt8(TestCpuPaged):
    """With keys and values that 8 bits have exactly, and queries that 16 bits have: it is no less exact than the others."""

    settings: ClassVar[dict[str, str]] = {"kv_format": "int8"}

    @pytest.fixture(autouse=True)
    def numbers_that_it_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rounded_sequences(
            spec: AttentionSpec, lengths: Sequence[tuple[int, int]], context: AttentionContext, seed: int = 0
        ) -> Sequences:
            made = make_sequences(spec, lengths, context, seed)
            q, k, v = (
                tuple(on_grid(one, limit) for one in part)
                for part, limit in ((made.q, 32639), (made.k, 127), (made.v, 127))
            )
            return replace(made, q=q, k=k, v=v)

        monkeypatch.setattr(testing_attention, "make_sequences", rounded_sequences)


class TestCpuPagedInt8Avx2(TestCpuPagedInt8):
    instructions = "avx2"


class TestCpuPagedInt8Portable(TestCpuPagedInt8):
    instructions = "portable"


class TestWithoutCompilerPagedInt8(TestCpuPagedInt8):
    def make(self, context: object) -> CpuPaged:
        with without_compiler():
            return super().make(context)


class CpuQuantContract(QuantContract):
    instructions: ClassVar[str] = "auto"

    def make(self, context: object) -> CpuQuant:
        return self.component(self.component.Settings(**needs(self.instructions)), context)


class TestFloat32(CpuQuantContract):
    component = Float32
    max_error = 0.005


class TestBfloat16(CpuQuantContract):
    component = Bfloat16
    max_error = 0.01


class TestInt8(CpuQuantContract):
    component = Int8
    max_error = 0.02


class TestInt4(CpuQuantContract):
    component = Int4
    max_error = 0.12


class TestGguf(CpuQuantContract):
    component = Gguf
    max_error = 0.02


class TestGgufPortable(TestGguf):
    instructions = "portable"


class TestInt8Avx2(TestInt8):
    instructions = "avx2"


class TestInt4Avx2(TestInt4):
    instructions = "avx2"


class TestInt8Portable(TestInt8):
    instructions = "portable"


class TestBfloat16Portable(TestBfloat16):
    instructions = "portable"


class NamedFloat32(Float32):
    """Remembers what it was asked for."""

    def __init__(self, settings: CpuQuantSettings, context: QuantContext):
        super().__init__(settings, context)
        self.names: list[str] = []

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear | TorchLinear:
        self.names.append(name)
        return super().linear(name, weight, bias)


class TestInt4WithoutCompiler(TestInt4):
    def make(self, context: object) -> CpuQuant:
        with without_compiler():
            return super().make(context)


class TestCpuModel(ModelContract):
    component = CpuModel
    attends = False
    native: ClassVar[bool] = True
    instructions: ClassVar[str] = "auto"
    kv_format: ClassVar[str] = "auto"

    def make_model(self, spec: ModelSpec) -> tuple[CpuModel, CpuPaged, NamedFloat32]:
        chosen = needs(self.instructions)
        settings = CpuPaged.Settings(kv_format=self.kv_format, **chosen)
        paged = CpuPaged(settings, AttentionContext(CPU, torch.float32, BLOCK_SIZE))
        named = NamedFloat32(CpuQuantSettings(**chosen), QuantContext(CPU, torch.float32))
        with torch.inference_mode():
            context = ModelContext(spec, CPU, torch.float32, paged, named, no_progress)
            made = CpuModel(CpuModel.Settings(weight_cache=False, **chosen), context)
        assert made.is_native is self.native
        return made, paged, named


class TestCpuQwen3(TestCpuModel):
    family = "qwen3"


class TestCpuQwen2(TestCpuModel):
    family = "qwen2"


class TestCpuGemma2(TestCpuModel):
    family = "gemma2"


class TestCpuGemma3(TestCpuModel):
    family = "gemma3_text"


class TestCpuMistral(TestCpuModel):
    family = "mistral"


class TestCpuGemma3Int8(TestCpuGemma3):
    kv_format = "int8"
    atol = 0.1  # of logits up to about 10: what rounding costs a model of random weights


class TestCpuModelWithoutCompiler(TestCpuGemma3):
    native = False

    def make_model(self, spec: ModelSpec) -> tuple[CpuModel, CpuPaged, NamedFloat32]:
        with without_compiler():
            return super().make_model(spec)


class TestCpuModelInt8WithoutCompiler(TestCpuGemma3Int8):
    native = False

    def make_model(self, spec: ModelSpec) -> tuple[CpuModel, CpuPaged, NamedFloat32]:
        with without_compiler():
            return super().make_model(spec)


class TestCpuModelAvx2(TestCpuGemma3):
    instructions = "avx2"


class TestCpuModelPortable(TestCpuQwen3):
    instructions = "portable"
