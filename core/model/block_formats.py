"""The tensor types of ggml by number: how many weights and bytes a block of each holds. Torch-free.

Source: https://github.com/ggml-org/ggml, `enum ggml_type` and the block structs of `ggml-common.h`. `core.model.dequant`
has the functions that turn blocks into floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml tensor type. A row of a tensor is a whole number of blocks."""

    name: str
    block_size: int  # weights
    block_bytes: int


FORMATS: Mapping[int, BlockFormat] = MappingProxyType(
    {
        0: BlockFormat("F32", 1, 4),
        1: BlockFormat("F16", 1, 2),
        2: BlockFormat("Q4_0", 32, 18),
        3: BlockFormat("Q4_1", 32, 20),
        6: BlockFormat("Q5_0", 32, 22),
        7: BlockFormat("Q5_1", 32, 24),
        8: BlockFormat("Q8_0", 32, 34),
        9: BlockFormat("Q8_1", 32, 40),
        10: BlockFormat("Q2_K", 256, 84),
        11: BlockFormat("Q3_K", 256, 110),
        12: BlockFormat("Q4_K", 256, 144),
        13: BlockFormat("Q5_K", 256, 176),
        14: BlockFormat("Q6_K", 256, 210),
        15: BlockFormat("Q8_K", 256, 292),
        16: BlockFormat("IQ2_XXS", 256, 66),
        17: BlockFormat("IQ2_XS", 256, 74),
        18: BlockFormat("IQ3_XXS", 256, 98),
        19: BlockFormat("IQ1_S", 256, 50),
        20: BlockFormat("IQ4_NL", 32, 18),
        21: BlockFormat("IQ3_S", 256, 110),
        22: BlockFormat("IQ2_S", 256, 82),
        23: BlockFormat("IQ4_XS", 256, 136),
        24: BlockFormat("I8", 1, 1),
        25: BlockFormat("I16", 1, 2),
        26: BlockFormat("I32", 1, 4),
        27: BlockFormat("I64", 1, 8),
        28: BlockFormat("F64", 1, 8),
        29: BlockFormat("IQ1_M", 256, 56),
        30: BlockFormat("BF16", 1, 2),
        34: BlockFormat("TQ1_0", 256, 54),
        35: BlockFormat("TQ2_0", 256, 66),
        39: BlockFormat("MXFP4", 32, 17),
    }
)

_DENSE = frozenset({"F32", "F16", "BF16"})
READABLE_WEIGHTS = (
    *("dense", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""Kinds of weights (see `weights_kind`) that `core.model.dequant` turns into floats."""
QUANTIZED_CHECKPOINTS = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "torchao")
"""`quant_method` of folders whose weights `core.model.quantized` turns into floats."""


def weights_kind(block_format: BlockFormat) -> str:
    """What `ModelSpec.weights` calls a tensor of this type: floats are dense, in whatever width."""
    return "dense" if block_format.name in _DENSE else block_format.name
