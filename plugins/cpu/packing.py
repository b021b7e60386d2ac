"""Weights in the order in which the kernels of `native/matrix.h` read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.dequant import block_parts
from core.model.weights import BlockWeight
from plugins.cpu.records import GROUP, TILE, Format, MatrixRecord

ITEM = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16}
FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Formats of GGUF files that INT4 can hold."""


def tile_bytes(form: Format, k: int) -> int:
    """Of a tile of 32 outputs (`tile_bytes` of `native/matrix.h`)."""
    groups = -(-k // GROUP)
    match form:
        case Format.FLOAT32 | Format.BFLOAT16:
            return groups * GROUP * TILE * ITEM[form].itemsize
        case Format.INT8:
            return groups * GROUP * TILE
        case Format.INT8_GROUPS:
            return groups * (2 * TILE + GROUP * TILE)
        case Format.INT4:
            return groups * (4 * TILE + GROUP * TILE // 2)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [n, k] in tiles of 32 outputs, both axes padded with zeros."""

    format: Format
    n: int
    k: int
    data: Tensor  # uint8 [num_tiles, bytes of a tile]
    scales: Tensor | None = None  # float32 [num_tiles * 32], of INT8
    bias: Tensor | None = None  # float32 [num_tiles * 32]

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def record(self) -> MatrixRecord:
        """Valid as long as this is."""
        scales, bias = (None if kept is None else kept.data_ptr() for kept in (self.scales, self.bias))
        return MatrixRecord(self.format, self.n, self.k, len(self.data), self.data.data_ptr(), scales, bias)


def pack(weight: Tensor, bias: Tensor | None, form: Format) -> PackedMatrix:
    n, k = weight.shape
    whole = F.pad(weight, (0, -k % GROUP, 0, -n % TILE))
    scales = None
    match form:
        case Format.INT8:
            data, scales = _int8(whole.float())
        case Format.INT4:
            data = _int4(*quantized_int4(whole.float()))
        case Format.INT8_GROUPS:
            data = _int8_groups(*quantized_int8_groups(whole.float()))
        case _:
            data = _dense(whole.to(ITEM[form]))
    return PackedMatrix(form, n, k, data, scales, _padded(bias))


def pack_blocks(blocks: Sequence[BlockWeight], bias: Tensor | None) -> PackedMatrix:
    """Matrices of a GGUF file, rows after rows. Four bits where all of them have that, else eight bits in groups.

    Q4_0, Q4_1 and Q8_0 are kept exactly; of Q4_K the products of two scales are rounded to float16.
    """
    form = block_form([block.block_format.name for block in blocks])
    n = sum(len(block.data) for block in blocks)
    parts = [_int4_of(block) if form is Format.INT4 else _int8_groups_of(block) for block in blocks]
    whole = [_padded_rows(torch.cat(each), n) for each in zip(*parts, strict=True)]
    data = _int4(*whole) if form is Format.INT4 else _int8_groups(*whole)
    return PackedMatrix(form, n, parts[0][0].shape[1], data, None, _padded(bias))


def block_form(block_formats: Sequence[str]) -> Format:
    """What `pack_blocks` makes of matrices in these formats."""
    return Format.INT4 if FOUR_BITS.issuperset(block_formats) else Format.INT8_GROUPS


def _padded(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else F.pad(bias.float(), (0, -len(bias) % TILE)).contiguous()


def _padded_rows(rows: Tensor, n: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, -n % TILE))


def _int4_of(block: BlockWeight) -> tuple[Tensor, Tensor, Tensor]:
    parts = block_parts(block.data, block.block_format)
    least = torch.zeros_like(parts.scales) if parts.least is None else parts.least
    return parts.numbers, parts.scales.half(), least.half()


def _int8_groups_of(block: BlockWeight) -> tuple[Tensor, Tensor]:
    if block.block_format.name == "Q8_0":
        parts = block_parts(block.data, block.block_format)
        return parts.numbers, parts.scales.half()
    return quantized_int8_groups(block.floats())


def _dense(whole: Tensor) -> Tensor:
    """Each column's numbers of four bytes lie beside those of the other 31: pairs of bfloat16, or one float32."""
    n, k = whole.shape
    per_unit = 4 // whole.element_size()
    units = whole.view(n // TILE, 2, 16, k // per_unit, per_unit).permute(0, 3, 1, 2, 4)
    return _bytes(units)


def _int8(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric, a scale for each output; stored above 128, since the machine multiplies unsigned by signed bytes."""
    n, k = whole.shape
    scales = whole.abs().amax(1) / 127
    numbers = (whole / scales.clamp_min(1e-30)[:, None]).round_().clamp_(-127, 127)
    units = (numbers + 128).to(torch.uint8).view(n // TILE, 2, 16, k // 4, 4).permute(0, 3, 1, 2, 4)
    return _bytes(units), scales.contiguous()


def quantized_int4(whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers uint8 [n, k] below 16, scales and least values float16 [n, k / 32]: weight = scale * number + least."""
    groups = whole.view(whole.shape[0], -1, GROUP)
    least, most = groups.amin(2), groups.amax(2)
    scales = ((most - least) / 15).half()
    least = least.half()
    steps = scales.float().clamp_min(1e-30)[..., None]
    numbers = ((groups - least.float()[..., None]) / steps).round_().clamp_(0, 15)
    return numbers.to(torch.uint8).view(whole.shape), scales, least


def quantized_int8_groups(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers int8 [n, k], scales float16 [n, k / 32]: symmetric, a scale for 32 weights."""
    groups = whole.view(whole.shape[0], -1, GROUP)
    scales = (groups.abs().amax(2) / 127).half()
    numbers = (groups / scales.float().clamp_min(1e-30)[..., None]).round_().clamp_(-127, 127)
    return numbers.to(torch.int8).view(whole.shape), scales


def _int8_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """Of each tile and group: 32 scales, then numbers as INT8 has them."""
    n, k = numbers.shape
    tiles, groups = n // TILE, k // GROUP
    units = (numbers.contiguous().view(torch.uint8) ^ 128).view(tiles, 2, 16, groups, 8, 4).permute(0, 3, 4, 1, 2, 5)
    factors = scales.view(tiles, TILE, groups).permute(0, 2, 1)
    parts = [_bytes(factors).view(tiles, groups, -1), units.reshape(tiles, groups, -1)]
    return torch.cat(parts, 2).view(tiles, -1).contiguous()


def _int4(numbers: Tensor, scales: Tensor, least: Tensor) -> Tensor:
    """Of each tile and group: 32 scales, 32 least values, then 4 times 64 bytes of two halves (see `native/matrix.h`)."""
    n, k = numbers.shape
    tiles, groups = n // TILE, k // GROUP
    halves = numbers.view(tiles, 2, 16, groups, 4, 2, 4)  # tile, half, column, group, j, low or high, k
    packed = (halves[:, :, :, :, :, 0] | halves[:, :, :, :, :, 1] << 4).permute(0, 3, 4, 1, 2, 5)
    factors = torch.stack((scales, least)).view(2, tiles, TILE, groups).permute(1, 3, 0, 2)
    parts = [_bytes(factors).view(tiles, groups, -1), packed.reshape(tiles, groups, -1)]
    return torch.cat(parts, 2).view(tiles, -1).contiguous()


def _bytes(units: Tensor) -> Tensor:
    """uint8 [tiles, …]"""
    return units.contiguous().view(len(units), -1).view(torch.uint8)


def rounded(weight: Tensor, form: Format) -> Tensor:
    """float32 [n, k]: what a packed weight stands for."""
    if form in ITEM:
        return weight.to(ITEM[form]).float()
    whole = F.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    if form is Format.INT8:
        scales = (whole.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
        made = (whole / scales).round().clamp(-127, 127) * scales
    elif form is Format.INT4:
        made = _multiplied(*quantized_int4(whole))
    else:
        made = _multiplied(*quantized_int8_groups(whole))
    return made[:, : weight.shape[1]]


def rounded_blocks(blocks: Sequence[BlockWeight]) -> Tensor:
    """float32 [n, k]: what `pack_blocks` packs."""
    form = block_form([block.block_format.name for block in blocks])
    of = _int4_of if form is Format.INT4 else _int8_groups_of
    return torch.cat([_multiplied(*of(block)) for block in blocks])


def _multiplied(numbers: Tensor, scales: Tensor, least: Tensor | None = None) -> Tensor:
    made = numbers.view(len(numbers), -1, GROUP).float() * scales.float()[..., None]
    return (made if least is None else made + least.float()[..., None]).view(numbers.shape)
