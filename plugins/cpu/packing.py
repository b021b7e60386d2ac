"""Weights in the order in which the kernels of `native/matrix.h` read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.cpu.records import GROUP, TILE, Format, MatrixRecord

ITEM = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16}


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
    kept = None if bias is None else F.pad(bias.float(), (0, -n % TILE)).contiguous()
    whole = F.pad(weight, (0, -k % GROUP, 0, -n % TILE))
    if form is Format.INT8:
        data, scales = _int8(whole.float())
        return PackedMatrix(form, n, k, data, scales, kept)
    data = _int4(*quantized_int4(whole.float())) if form is Format.INT4 else _dense(whole.to(ITEM[form]))
    return PackedMatrix(form, n, k, data, None, kept)


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
    else:
        numbers, steps, least = quantized_int4(whole)
        groups = numbers.view(len(whole), -1, GROUP).float()
        made = (groups * steps.float()[..., None] + least.float()[..., None]).view(whole.shape)
    return made[:, : weight.shape[1]]
