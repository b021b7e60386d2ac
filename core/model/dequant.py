"""GGML block formats to float tensors, vectorised.

A row is a whole number of blocks; a block holds `block_size` weights in `block_bytes` bytes. The layouts are those of
ggml (https://github.com/ggml-org/ggml, block structs of `ggml-common.h`). Every product of scales and quants below fits
the 24-bit significand of float32, so results do not depend on the order of operations and equal other readers' exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from core.model.block_formats import FORMATS, BlockFormat

__all__ = ["FORMATS", "PARTS", "SLICE_ELEMENTS", "UNPACKERS", "BlockFormat", "BlockParts", "block_parts", "dequantize"]

Unpack = Callable[[Tensor], Tensor]  # uint8 [n, block_bytes] -> float32 [n, block_size]

SLICE_ELEMENTS = 1 << 22  # weights per slice: bounds the float32 intermediates to tens of megabytes


def dequantize(raw: Tensor, block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, row_bytes] -> `dtype` [rows, cols], a slice of rows at a time so that float32 never exists whole.

    Raises ValueError when the format has no unpacker or a row is not a whole number of blocks.
    """
    unpack = UNPACKERS.get(block_format.name)
    if unpack is None:
        raise ValueError(f"type {block_format.name} cannot be dequantised")
    rows, row_bytes = raw.shape
    if row_bytes % block_format.block_bytes:
        raise ValueError(f"{row_bytes} bytes per row is not a whole number of {block_format.name} blocks")
    cols = row_bytes // block_format.block_bytes * block_format.block_size
    out = torch.empty(rows, cols, dtype=dtype)
    step = max(1, SLICE_ELEMENTS // max(cols, 1))
    for start in range(0, rows, step):
        blocks = raw[start : start + step].reshape(-1, block_format.block_bytes)
        out[start : start + step] = unpack(blocks).view(-1, cols)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """A matrix in groups of 32 before it is multiplied out: weight = scale * number + least."""

    numbers: Tensor  # uint8 or int8 [rows, cols]
    scales: Tensor  # float32 [rows, cols / 32]
    least: Tensor | None  # likewise; None: 0


def block_parts(raw: Tensor, block_format: BlockFormat) -> BlockParts:
    """uint8 [rows, row_bytes] of a format among `PARTS`. Multiplied out it is what `dequantize` gives."""
    parts = PARTS[block_format.name](raw.reshape(-1, block_format.block_bytes))
    rows = len(raw)
    least = None if parts.least is None else parts.least.view(rows, -1)
    return BlockParts(parts.numbers.view(rows, -1), parts.scales.view(rows, -1), least)


def _half(two_bytes: Tensor) -> Tensor:
    """uint8 [..., 2k] -> float32 [..., k]. Copies, since a block's scale may lie at an odd address."""
    return two_bytes.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., k] -> uint8 [..., 2, k]: low nibbles first, then high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _shifted(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """uint8 [..., k] -> uint8 [..., len(shifts), k]: `(packed >> s) & mask` for each shift."""
    amounts = torch.tensor(list(shifts), dtype=torch.uint8).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> amounts) & mask


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4] -> uint8 [n, 32]: bit i of the little-endian word belongs to weight i."""
    return _shifted(packed, range(8), 1).transpose(-1, -2).reshape(-1, 32)


def _float32(blocks: Tensor) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _bfloat16(blocks: Tensor) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    """d f16, 16 bytes: w = d * (q - 8)."""
    q = _nibbles(blocks[:, 2:]).reshape(-1, 32)
    return _half(blocks[:, :2]) * (q.float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, 16 bytes: w = d * q + m."""
    q = _nibbles(blocks[:, 4:]).reshape(-1, 32)
    return _half(blocks[:, :2]) * q.float() + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    """d f16, 4 bytes of fifth bits, 16 bytes: w = d * (q - 16)."""
    q = _nibbles(blocks[:, 6:]).reshape(-1, 32) | (_fifth_bits(blocks[:, 2:6]) << 4)
    return _half(blocks[:, :2]) * (q.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, 4 bytes of fifth bits, 16 bytes: w = d * q + m."""
    q = _nibbles(blocks[:, 8:]).reshape(-1, 32) | (_fifth_bits(blocks[:, 4:8]) << 4)
    return _half(blocks[:, :2]) * q.float() + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    """d f16, 32 int8: w = d * q."""
    return _half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8).float()


def _affine(scale: Tensor, quant: Tensor, minimum: Tensor) -> Tensor:
    """scale, minimum [n, sub_blocks] and quant [n, sub_blocks, k] -> [n, 256]: scale * quant - minimum."""
    return (scale.unsqueeze(-1) * quant.float() - minimum.unsqueeze(-1)).reshape(-1, 256)


def _two_bit_quants(packed: Tensor) -> Tensor:
    """uint8 [n, 64] -> uint8 [n, 2, 4, 32]: two halves of 32 bytes, each byte holds one weight of four sub-blocks."""
    return _shifted(packed.reshape(-1, 2, 32), range(0, 8, 2), 3)


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of 4-bit (scale, min), 64 bytes, d f16, dmin f16."""
    scales = blocks[:, :16]
    q = _two_bit_quants(blocks[:, 16:80]).reshape(-1, 16, 16)
    return _affine(_half(blocks[:, 80:82]) * (scales & 15), q, _half(blocks[:, 82:84]) * (scales >> 4))


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits (set: no offset of 4), 64 bytes, 12 bytes of 6-bit scales less 32, d f16."""
    high = _shifted(blocks[:, :32], range(8), 1).reshape(-1, 2, 4, 32)
    q = _two_bit_quants(blocks[:, 32:96]).float() - (1 - high.float()) * 4
    low4 = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high2 = _shifted(blocks[:, 104:108], range(0, 8, 2), 3).reshape(-1, 16)
    scale = _half(blocks[:, 108:110]) * ((low4 | (high2 << 4)).float() - 32)
    return (scale.unsqueeze(-1) * q.reshape(-1, 16, 16)).reshape(-1, 256)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> eight 6-bit scales and eight 6-bit minimums, [n, 8] each (Q4_K and Q5_K share the layout)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scale, minimum


def _q4_k(blocks: Tensor) -> Tensor:
    """d f16, dmin f16, 12 bytes of scales, 128 bytes: 32 bytes hold sub-block 2g (low) and 2g+1 (high)."""
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _affine(_half(blocks[:, :2]) * scale, q, _half(blocks[:, 2:4]) * minimum)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K with 32 bytes of fifth bits before the quants: bit j of each byte belongs to sub-block j."""
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    q = low | (_shifted(blocks[:, 16:48], range(8), 1) << 4)
    return _affine(_half(blocks[:, :2]) * scale, q, _half(blocks[:, 2:4]) * minimum)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 bytes of high pairs, 16 int8 scales, d f16: w = d * scale * (q - 32)."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3)
    q = (low | (high << 4)).float().reshape(-1, 16, 16) - 32
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8)
    return (scale.unsqueeze(-1) * q).reshape(-1, 256)


UNPACKERS: Mapping[str, Unpack] = MappingProxyType(
    {
        "F32": _float32,
        "F16": _half,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "BF16": _bfloat16,
    }
)
"""By name of the block format; the formats that are not here are known by size but cannot be read."""


def _q4_0_parts(blocks: Tensor) -> BlockParts:
    scale = _half(blocks[:, :2])
    return BlockParts(_nibbles(blocks[:, 2:]).reshape(-1, 32), scale, -8 * scale)


def _q4_1_parts(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:]).reshape(-1, 32), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q4_k_parts(blocks: Tensor) -> BlockParts:
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return BlockParts(numbers, _half(blocks[:, :2]) * scale, _half(blocks[:, 2:4]) * minimum * -1.0)


def _q8_0_parts(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks[:, :2]), None)


PARTS: Mapping[str, Callable[[Tensor], BlockParts]] = MappingProxyType(
    {"Q4_0": _q4_0_parts, "Q4_1": _q4_1_parts, "Q4_K": _q4_k_parts, "Q8_0": _q8_0_parts}
)
"""By name of the block format: those whose numbers lie in groups of 32."""
