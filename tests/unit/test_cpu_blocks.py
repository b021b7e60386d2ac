"""Weights of GGUF files in the CPU runtime: their blocks stay what they are, or become 8 bits in groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.model.block_formats import FORMATS, BlockFormat
from core.model.dequant import PARTS, block_parts, dequantize
from core.model.interface import QuantContext
from core.model.weights import BlockWeight, GGUFWeights
from plugins.cpu.library import load
from plugins.cpu.packing import pack, rounded, rounded_blocks
from plugins.cpu.program import OpList, Program
from plugins.cpu.quant import Gguf, Int4, PackedLinear
from plugins.cpu.records import Format, Kind, StepRecord
from plugins.cpu.settings import CpuQuantSettings

BY_NAME = {one.name: one for one in FORMATS.values()}
DATA = Path(__file__).resolve().parents[1] / "data" / "gguf"
ROWS, COLUMNS = 70, 256  # no multiple of a tile


def random_blocks(name: str, rows: int = ROWS) -> BlockWeight:
    """Any bytes are numbers of such a format, but for the scales, which are half floats."""
    form: BlockFormat = BY_NAME[name]
    draw = torch.Generator().manual_seed(7)
    count = rows * COLUMNS // form.block_size
    blocks = torch.randint(0, 256, (count, form.block_bytes), generator=draw, dtype=torch.uint8)
    for start in {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
        scales = torch.randn(count, 1, generator=draw).mul(0.01).half()
        blocks[:, start : start + 2] = scales.view(torch.uint8)
    return BlockWeight(blocks.view(rows, -1), form)


@pytest.mark.parametrize("name", PARTS)
def test_parts_multiplied_out_are_what_dequantize_gives(name: str) -> None:
    weight = random_blocks(name)
    parts = block_parts(weight.data, weight.block_format)
    made = parts.numbers.view(ROWS, -1, 32).float() * parts.scales[..., None]
    if parts.least is not None:
        made += parts.least[..., None]
    assert torch.equal(made.view(ROWS, COLUMNS), dequantize(weight.data, weight.block_format, torch.float32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_these_are_kept_to_the_last_bit(name: str) -> None:
    weight = random_blocks(name)
    assert torch.equal(rounded_blocks([weight]), weight.floats())


@pytest.mark.parametrize(("name", "error"), [("Q4_K", 0.004), ("Q5_0", 0.005), ("Q5_K", 0.005), ("Q6_K", 0.006)])
def test_others_are_kept_nearly(name: str, error: float) -> None:
    weight = random_blocks(name)
    floats = weight.floats()
    off = (rounded_blocks([weight]) - floats).abs().view(ROWS, -1, 32).amax(2)
    assert bool((off <= error * floats.abs().view(ROWS, -1, 32).amax(2) + 1e-5).all())


@pytest.mark.parametrize("instructions", ["auto", "avx2", "portable"])
@pytest.mark.parametrize(
    "names", [("Q4_0",), ("Q4_1",), ("Q4_K",), ("Q8_0",), ("Q6_K",), ("Q4_0", "Q4_1"), ("Q4_K", "Q6_K", "Q5_0")]
)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_products_are_those_of_the_floats(names: tuple[str, ...], instructions: str, num_rows: int) -> None:
    blocks = [random_blocks(name, rows) for name, rows in zip(names, (ROWS, 33, 5), strict=False)]
    bias = torch.randn(sum(len(block.data) for block in blocks), generator=torch.Generator().manual_seed(2))
    quant = Gguf(CpuQuantSettings(instructions=instructions), QuantContext(torch.device("cpu"), torch.float32))
    x = torch.randn(num_rows, COLUMNS, generator=torch.Generator().manual_seed(3))
    found = quant.block_linear("model.layers.0.mlp.up_proj", blocks, bias)(x)
    expected = F.linear(x, torch.cat([block.floats() for block in blocks]), bias)
    assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("form", Format)
def test_a_row_of_the_head_is_an_embedding(form: Format) -> None:
    weight = torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(5)) * 0.1
    ops = OpList()
    target = ops.floats(96, Kind.OUTPUT)
    ops.embed_tied(ops.matrix(pack(weight, None, form)), 2.0, target)
    ids = torch.tensor([0, 69, 31, 32, 5])
    out = torch.empty(5, 96)
    Program(load(), 1, ops, Format.FLOAT32).run(
        StepRecord(num_tokens=5, token_ids=ids.data_ptr(), output=out.data_ptr())
    )
    assert torch.allclose(out, rounded(weight, form)[ids] * 2.0, rtol=1e-6, atol=1e-7)


def test_which_quant_takes_which_blocks() -> None:
    context = QuantContext(torch.device("cpu"), torch.float32)
    four, file = Int4(CpuQuantSettings(), context), Gguf(CpuQuantSettings(), context)
    assert four.takes_blocks("model.layers.0.mlp.up_proj", ["Q4_1", "Q4_0"])
    assert not four.takes_blocks("model.layers.0.mlp.up_proj", ["Q8_0"])  # four bits are asked for
    assert not four.takes_blocks("lm_head", ["Q4_0"])  # and eight for the head
    assert file.takes_blocks("lm_head", ["Q6_K"]) and file.takes_blocks("model.layers.0.mlp.up_proj", ["Q4_0"])
    made = file.linear("lm_head", torch.randn(40, 64), None)
    assert isinstance(made, PackedLinear) and made.packed.format is Format.INT8_GROUPS


def test_rows_of_a_file_are_in_the_order_of_hugging_face() -> None:
    source = GGUFWeights(DATA / "tiny-h128-Q4_0.gguf")
    for name in sorted(source.names()):
        blocks = source.blocks(name)
        floats = source.read(name, torch.float32)
        assert blocks is None or torch.equal(blocks.floats(), floats), name
    assert source.blocks("model.layers.0.self_attn.q_proj.weight") is not None
    assert source.blocks("model.norm.weight") is None


def test_the_machine_has_limits() -> None:
    """That more bits are no faster, and that each is a rate, is all that holds everywhere."""
    ops = OpList()
    program = Program(load(), 1, ops, Format.FLOAT32)
    rates = [program.ceilings(form) for form in (Format.FLOAT32, Format.BFLOAT16, Format.INT8, Format.INT4)]
    assert all(1e7 < rate < 1e15 for pair in rates for rate in pair)
