"""AWQ (arXiv:2306.00978) as AutoAWQ writes it, 4 bits with zero points stored as they are.

| version | `qweight` int32 | order in a word | `qzeros` int32, `scales` |
|---|---|---|---|
| gemm | [in, out / 8] | outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on | [groups, out / 8], [groups, out] |
| gemv | [out, in / 8] | as they follow | [out, groups / 8], [out, groups], both filled up |
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from core.model.quantized.bits import unpack
from core.model.quantized.scheme import Module, QuantConfig, grouped, in_order, inputs_per_group

BITS, PER_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of its word each of eight outputs lies."""


class Awq:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    markers: ClassVar[tuple[str, ...]] = ("qweight",)
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: QuantConfig):
        config.choice("bits", (BITS,))
        self._group_size = config.group_size()
        stored = config.first("version", "checkpoint_format", "format")
        self._floats = {"gemm": self._gemm, "gemv": self._gemv}[config.choice(stored, ("gemm", "gemv"), "gemm")]

    def floats(self, module: Module) -> Tensor:
        return self._floats(module)

    def _gemm(self, module: Module) -> Tensor:
        packed = module.matrix("qweight", torch.int32)
        num_inputs, num_words = packed.shape
        size = inputs_per_group(self._group_size, num_inputs)
        num_groups, num_outputs = -(-num_inputs // size), num_words * PER_WORD
        zeros = _interleaved(module.tensor("qzeros", (num_groups, num_words), torch.int32))
        scales = module.tensor("scales", (num_groups, num_outputs))
        return grouped(_interleaved(packed), zeros, scales, in_order(num_inputs, size))

    def _gemv(self, module: Module) -> Tensor:
        packed = module.matrix("qweight", torch.int32)
        num_outputs, num_inputs = packed.shape[0], packed.shape[1] * PER_WORD
        size = inputs_per_group(self._group_size, num_inputs)
        num_groups = -(-num_inputs // size)
        scales, packed_zeros = module.tensor("scales"), module.matrix("qzeros", torch.int32)
        for suffix, found, columns in (
            ("scales", scales, scales.shape[-1]),
            ("qzeros", packed_zeros, packed_zeros.shape[-1] * PER_WORD),
        ):
            if found.shape[:-1] != (num_outputs,) or columns < num_groups:
                raise module.error(
                    suffix, f"has shape {list(found.shape)}, for {num_outputs} outputs and {num_groups} groups"
                )
        zeros = unpack(packed_zeros, BITS, num_groups)
        codes = unpack(packed, BITS, num_inputs)
        return grouped(codes.t(), zeros.t(), scales[:, :num_groups].t(), in_order(num_inputs, size))


def _interleaved(packed: Tensor) -> Tensor:
    """int32 [rows, columns / 8] -> uint8 [rows, columns]"""
    places = unpack(packed, BITS, packed.shape[1] * PER_WORD).view(len(packed), -1, PER_WORD)
    found: Tensor = places[:, :, list(PLACES)].flatten(1)
    return found
