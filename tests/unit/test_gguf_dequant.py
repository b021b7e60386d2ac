"""Dequantisation is exact: bit for bit what the gguf package computes, on random blocks and on real files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from core.model import dequant
from core.model.block_formats import FORMATS, BlockFormat
from core.model.dequant import UNPACKERS, dequantize
from core.model.gguf import GGUFFile

DATA = Path(__file__).parents[1] / "data" / "gguf"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text())
READABLE = {type_id: known for type_id, known in FORMATS.items() if known.name in UNPACKERS}
# Where the float16 scales of a block lie; random bytes there would often be infinities and NaNs.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]}
SCALES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_blocks(known: BlockFormat, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (count, known.block_bytes), dtype=np.uint8)
    for place in SCALES.get(known.name, []):
        scales = source.normal(0, 0.1, count).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def same_bits(ours: torch.Tensor, theirs: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(ours.numpy().view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32))


def test_table_of_types_agrees_with_the_gguf_package() -> None:
    for type_id, known in FORMATS.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (known.name, (known.block_size, known.block_bytes))
    wanted = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert {known.name for known in READABLE.values()} == wanted


@pytest.mark.parametrize("type_id", READABLE, ids=lambda type_id: FORMATS[type_id].name)
def test_random_blocks_are_exact(type_id: int) -> None:
    known = FORMATS[type_id]
    blocks = random_blocks(known, 6 * 64, seed=type_id)
    if known.block_size == 1:  # plain floats: every finite pattern
        blocks = blocks[np.isfinite(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type_id))).all(-1)][:360]
    rows = blocks.reshape(6, -1)
    theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type_id))
    ours = dequantize(torch.from_numpy(rows), known, torch.float32)
    assert ours.shape == theirs.shape and same_bits(ours, theirs)


@pytest.mark.parametrize("type_id", READABLE, ids=lambda type_id: FORMATS[type_id].name)
def test_slices_and_target_dtype_change_nothing(type_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FORMATS[type_id]
    raw = torch.from_numpy(random_blocks(known, 7 * 4, seed=99).reshape(7, -1))
    whole = dequantize(raw, known, torch.float32)
    monkeypatch.setattr(dequant, "SLICE_ELEMENTS", 2 * whole.shape[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sliced = dequantize(raw, known, dtype)
        assert sliced.dtype == dtype
        assert torch.equal(sliced.nan_to_num(), whole.to(dtype).nan_to_num())


@pytest.mark.parametrize("type_id", READABLE, ids=lambda type_id: FORMATS[type_id].name)
def test_blocks_at_odd_addresses(type_id: int) -> None:
    known = FORMATS[type_id]
    rows = random_blocks(known, 8, seed=5).reshape(2, -1)
    shifted = torch.zeros(rows.size + 1, dtype=torch.uint8)
    shifted[1:] = torch.from_numpy(rows).flatten()
    aligned = dequantize(torch.from_numpy(rows), known, torch.float32)
    odd = dequantize(shifted[1:].view(2, -1), known, torch.float32)
    assert torch.equal(odd.nan_to_num(), aligned.nan_to_num())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_fixture_files_equal_the_reference(name: str) -> None:
    file = GGUFFile.open(DATA / name)
    for tensor, digest in EXPECTED[name]["sha256"].items():
        values = file.read(tensor)
        assert values.dtype == torch.float32 and values.shape == file.tensors[tensor].shape
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == digest, tensor


def test_unreadable_format_and_broken_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="IQ4_XS"):
        dequantize(torch.zeros(1, 136, dtype=torch.uint8), FORMATS[23], torch.float32)
    with pytest.raises(ValueError, match="17 bytes per row is not a whole number of Q4_0 blocks"):
        dequantize(torch.zeros(1, 17, dtype=torch.uint8), FORMATS[2], torch.float32)
