"""What a file of packed weights says of itself, and whether that can be: compiled code reads what it points to."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch

from plugins.cpu.packing import tile_bytes
from plugins.cpu.records import TILE, Format

ALIGNMENT = 64
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}


class StoredTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    start: int  # byte of the file

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class StoredMatrix(msgspec.Struct, frozen=True):
    """Of a `PackedMatrix`."""

    format: int
    n: int
    k: int
    data: StoredTensor
    scales: StoredTensor | None = None
    bias: StoredTensor | None = None


class Index(msgspec.Struct, frozen=True):
    tensors: Mapping[str, StoredTensor] = {}
    matrices: Mapping[str, StoredMatrix] = {}

    @classmethod
    def read(cls, text: bytes, num_bytes: int) -> Index:
        """Of a file with so many bytes of data. Raises ValueError for what cannot be."""
        try:
            index = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"its index is no index: {error}") from None
        for name, tensor in index.tensors.items():
            _check(name, tensor, num_bytes)
        for name, matrix in index.matrices.items():
            _check_matrix(name, matrix, num_bytes)
        return index


def _check(name: str, tensor: StoredTensor, num_bytes: int) -> None:
    sound = tensor.dtype in DTYPES and all(size >= 0 for size in tensor.shape)
    if not sound or tensor.start < 0 or tensor.start % ALIGNMENT or tensor.start + tensor.num_bytes > num_bytes:
        raise ValueError(f"{name} is not within it")


def _check_matrix(name: str, matrix: StoredMatrix, num_bytes: int) -> None:
    if matrix.format not in list(Format) or matrix.n < 1 or matrix.k < 1:
        raise ValueError(f"{name} has no size or format")
    form, num_tiles = Format(matrix.format), -(-matrix.n // TILE)
    factors = {"dtype": "torch.float32", "shape": [num_tiles * TILE]}
    wanted = {
        "data": {"dtype": "torch.uint8", "shape": [num_tiles, tile_bytes(form, matrix.k)]},
        "scales": factors if form is Format.INT8 else None,
        "bias": factors if matrix.bias is not None else None,
    }
    for part, like in wanted.items():
        stored = getattr(matrix, part)
        if (None if stored is None else {"dtype": stored.dtype, "shape": stored.shape}) != like:
            raise ValueError(f"{name} has other {part} than its size wants")
        if stored is not None:
            _check(name, stored, num_bytes)
