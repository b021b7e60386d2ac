"""Weights in tiles for compiled code, in four formats; where there is no compiler, the same numbers through torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.interface import QuantContext
from core.model.weights import BlockWeight
from plugins.cpu.library import Library, available
from plugins.cpu.packing import PackedMatrix, block_form, pack, pack_blocks, rounded, rounded_blocks
from plugins.cpu.program import OpList, Program
from plugins.cpu.records import Format, Kind, StepRecord
from plugins.cpu.settings import CpuQuantSettings

HEAD = "lm_head"


class PackedLinear:
    """`core.model.interface.Linear` of a packed weight."""

    def __init__(self, packed: PackedMatrix, library: Library, dtype: torch.dtype):
        self.packed = packed
        self._library = library
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        given = x.float().contiguous()
        out = torch.empty(len(x), self.packed.n)
        step = StepRecord(num_tokens=len(x), input=given.data_ptr(), output=out.data_ptr())
        self._program.run(step)
        return out.to(self._dtype)

    @cached_property
    def _program(self) -> Program:
        packed, ops = self.packed, OpList()
        source, rows, target = (
            ops.floats(packed.k, Kind.INPUT),
            ops.rows(packed.k, packed.format),
            ops.floats(packed.n, Kind.OUTPUT),
        )
        ops.convert(source, rows)
        ops.linear(rows, ops.matrix(packed), target)
        return Program(self._library, torch.get_num_threads(), ops, Format.FLOAT32)


class TorchLinear:
    """The slow twin: weights and activations rounded as the compiled code has them, and multiplied by torch in float32.

    `weight` float32 [n, k], rounded already.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Format, dtype: torch.dtype):
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self._form = form
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(rounded_rows(x.float(), self._form), self._weight, self._bias).to(self._dtype)


def rounded_rows(x: Tensor, form: Format) -> Tensor:
    """float32 [T, k]: activations as a weight of this format meets them. (Native code does not round them to bfloat16 where the
    processor has no products of that.)"""
    if form.of_rows is Format.FLOAT32:
        return x
    if form.of_rows is Format.BFLOAT16:
        return x.bfloat16().float()
    groups = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / scales.clamp_min(1e-30)).round() * scales).view(len(x), -1)[:, : x.shape[1]]


class CpuQuant:
    """See `core.model.interface.QuantMethod`."""

    Settings = CpuQuantSettings
    form: ClassVar[Format]
    head_form: ClassVar[Format]

    def __init__(self, settings: CpuQuantSettings, context: QuantContext):
        self._dtype = context.dtype
        self._library = available(settings.instructions)

    def takes_blocks(self, name: str, block_formats: Sequence[str]) -> bool:
        """Blocks that are of this very format stay what they are."""
        return self.form_of(name) is block_form(block_formats)

    def form_of(self, name: str) -> Format:
        return self.head_form if name == HEAD else self.form

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear | TorchLinear:
        form = self.form_of(name)
        if self._library is None:
            return TorchLinear(rounded(weight, form), bias, form, self._dtype)
        return PackedLinear(pack(weight, bias, form), self._library, self._dtype)

    def block_linear(self, name: str, blocks: Sequence[BlockWeight], bias: Tensor | None) -> PackedLinear | TorchLinear:
        if self._library is None:
            form = block_form([block.block_format.name for block in blocks])
            return TorchLinear(rounded_blocks(blocks), bias, form, self._dtype)
        return PackedLinear(pack_blocks(blocks, bias), self._library, self._dtype)


class Float32(CpuQuant):
    form = head_form = Format.FLOAT32


class Bfloat16(CpuQuant):
    form = head_form = Format.BFLOAT16


class Int8(CpuQuant):
    """A scale for 32 weights: one for each output costs a small model half a percent of perplexity, but in the head."""

    form, head_form = Format.INT8_GROUPS, Format.INT8


class Int4(CpuQuant):
    form, head_form = Format.INT4, Format.INT8


class Gguf(CpuQuant):
    """Weights as the file has them, in the narrowest of our formats that holds them. What is not in blocks becomes 8 bits."""

    form = head_form = Format.INT8_GROUPS

    def takes_blocks(self, name: str, block_formats: Sequence[str]) -> bool:
        return True
