"""Keys and values in 8 bits: compiled code against its slow twin, on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.model.interface import AttentionContext, AttentionSpec
from core.testing.attention import Sequences, make_sequences, naive_attention
from plugins.cpu import attention, library
from plugins.cpu.attention import CpuPaged, bytes_per_token, cache_format
from plugins.cpu.library import NoNativeCodeError
from plugins.cpu.records import SUB, Format
from plugins.cpu.settings import Instructions
from plugins.cpu.torch_attention import Int8Blocks, rounded_heads

CONTEXT = AttentionContext(torch.device("cpu"), torch.float32, 16)
SPECS = {
    "one head": AttentionSpec(0, 1, 1, 16, 0.25),
    "twelve to one": AttentionSpec(0, 12, 1, 32, 0.2),
    "more than fit at once": AttentionSpec(0, 30, 2, 16, 0.25),
    "three to one": AttentionSpec(0, 9, 3, 64, 0.125),
    "odd width": AttentionSpec(0, 4, 2, 80, 0.1),
    "wide": AttentionSpec(0, 8, 1, 256, 0.0625),
    "window": AttentionSpec(0, 6, 2, 48, 0.15, sliding_window=21),
    "softcap": AttentionSpec(0, 4, 2, 128, 0.1, softcap=5.0),
    "both": AttentionSpec(0, 5, 1, 32, 0.3, softcap=3.0, sliding_window=300),
}
LENGTHS = ((0, 19), (40, 1), (290, 4), (37, 26), (600, 1), (15, 1))
INSTRUCTIONS: tuple[Instructions, ...] = ("auto", "avx512", "avx2", "portable")


def native(instructions: Instructions = "auto", context: AttentionContext = CONTEXT) -> CpuPaged:
    try:
        library.load(instructions)
    except NoNativeCodeError as error:
        pytest.skip(str(error))
    return CpuPaged(CpuPaged.Settings(kv_format="int8", instructions=instructions), context)


def twin(context: AttentionContext = CONTEXT) -> CpuPaged:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "available", lambda instructions: None)
        return CpuPaged(CpuPaged.Settings(kv_format="int8"), context)


def run(
    backend: CpuPaged, spec: AttentionSpec, made: Sequences, *, context: AttentionContext = CONTEXT, chunk: int = 1000
) -> tuple[list[Tensor], Tensor]:
    """Outputs of each request, all of whose tokens are computed, `chunk` in a batch; and the cache, NaN before."""
    cache = torch.full(backend.kv_shape(spec, made.num_blocks), torch.nan, dtype=context.dtype)
    ends = [len(q) for q in made.q]
    outs: list[list[Tensor]] = [[] for _ in ends]
    for start in range(0, max(ends), chunk):
        counts = [max(min(chunk, end - start), 0) for end in ends]
        q, k, v = (made.rows(part, [start] * len(ends), counts) for part in (made.q, made.k, made.v))
        batch = made.batch([start] * len(ends), counts, context.block_size)
        out = backend.forward(spec, q, k, v, cache, backend.prepare(batch, [spec]))
        for found, part in zip(outs, out.split(counts), strict=True):
            found.append(part)
    return [torch.cat(found) for found in outs], cache


def slots_of(made: Sequences, request: int) -> Tensor:
    positions = torch.arange(len(made.q[request]))
    return torch.tensor(made.tables[request])[positions // 16] * 16 + positions % 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_slow_twin(name: str, instructions: Instructions, dtype: torch.dtype) -> None:
    spec, context = SPECS[name], replace(CONTEXT, dtype=dtype)
    made = make_sequences(spec, LENGTHS, context)
    found, cache = run(native(instructions, context), spec, made, context=context)
    expected, twins_cache = run(twin(context), spec, made, context=context)
    for request, (one, other) in enumerate(zip(found, expected, strict=True)):
        slots = slots_of(made, request)
        pairs = zip(Int8Blocks(cache, spec).read(slots), Int8Blocks(twins_cache, spec).read(slots), strict=True)
        for mine, theirs in pairs:
            steps = theirs.abs().amax(-1, keepdim=True) / 127
            assert bool(((mine - theirs).abs() <= 1.01 * steps).all())
            # ties that a fused product rounds the other way; short numbers have more of them
            assert float((mine != theirs).float().mean()) < 0.005
        torch.testing.assert_close(one.float(), other.float(), atol=1e-3 if dtype == torch.float32 else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("make", [native, twin])
@pytest.mark.parametrize("name", SPECS)
def test_is_near_what_no_rounding_gives(name: str, make: Callable[[], CpuPaged]) -> None:
    spec = SPECS[name]
    made = make_sequences(spec, ((0, 40), (290, 1)), CONTEXT)
    for index, out in enumerate(run(make(), spec, made)[0]):
        expected = naive_attention(spec, made.q[index], made.k[index], made.v[index], 0)
        assert float((out - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(name: str, instructions: Instructions) -> None:
    spec, backend = SPECS[name], native(instructions)
    made = make_sequences(spec, LENGTHS, CONTEXT)
    together, _ = run(backend, spec, made)
    for chunk in (7, 64):
        for one, other in zip(run(backend, spec, made, chunk=chunk)[0], together, strict=True):
            assert torch.equal(one, other)
    for index, expected in enumerate(together):
        assert torch.equal(run(backend, spec, made.only(index))[0][0], expected)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_what_is_no_number_shows_where_it_is_seen_and_nowhere_else(
    instructions: Instructions, which: str, number: float
) -> None:
    spec, backend = SPECS["window"], native(instructions)
    made = make_sequences(spec, ((0, 60), (0, 60)), CONTEXT)
    clean, _ = run(backend, spec, made)
    k, v = made.k[1].clone(), made.v[1].clone()
    (k if which == "k" else v)[30, 0, 3] = number
    out, _ = run(backend, spec, replace(made, k=(made.k[0], k), v=(made.v[0], v)))
    assert torch.equal(out[0], clean[0])
    ratio, window = spec.num_heads // spec.num_kv_heads, spec.sliding_window or 0
    seen = torch.zeros(60, spec.num_heads, dtype=torch.bool)
    seen[30 : 30 + window, :ratio] = True  # of the first kv head
    assert bool(out[1][seen].isnan().all())
    assert torch.equal(out[1][~seen], clean[1][~seen])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_query_that_is_no_number_stays_alone(instructions: Instructions) -> None:
    spec, backend = SPECS["three to one"], native(instructions)
    made = make_sequences(spec, ((0, 20),), CONTEXT)
    clean, _ = run(backend, spec, made)
    q = made.q[0].clone()
    q[7, 4, 0] = torch.nan
    out, _ = run(backend, spec, replace(made, q=(q,)))
    assert bool(out[0][7, 4].isnan().all())
    out[0][7, 4] = clean[0][7, 4]
    assert torch.equal(out[0], clean[0])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_sums_of_the_largest_numbers_fit(instructions: Instructions) -> None:
    """512 products of 127 and of the largest query, of either sign."""
    spec = AttentionSpec(0, 2, 1, 512, 1.0 / 512)
    ones = torch.ones(20, 1, 512)
    k = ones * torch.where(torch.arange(20) % 2 == 0, 1.0, -1.0)[:, None, None]
    v = torch.randn(20, 1, 512, generator=torch.Generator().manual_seed(3))
    q = torch.cat((ones, -ones), 1)
    made = replace(make_sequences(spec, ((0, 20),), CONTEXT), q=(q,), k=(k,), v=(v,))
    numbers, scales = rounded_heads(v)
    expected = naive_attention(spec, q, k, numbers.float() * scales[..., None], 0)
    torch.testing.assert_close(run(native(instructions), spec, made)[0][0], expected, atol=1e-4, rtol=1e-3)


def test_zeros_and_tiny_numbers_are_rounded_to_zero() -> None:
    x = torch.tensor([[[0.0] * 16, [1e-38] * 16, [2.0, -1.0, *[0.0] * 14]]])
    numbers, scales = rounded_heads(x)
    assert numbers[0, :2].count_nonzero() == 0 and bool(scales.isfinite().all())
    assert numbers[0, 2, :2].tolist() == [127, -64] and float(scales[0, 2]) == pytest.approx(2 / 127)
    spec = AttentionSpec(0, 3, 3, 16, 1.0)
    for backend in (native(), twin()):
        out, _ = run(backend, spec, replace(make_sequences(spec, ((0, 1),), CONTEXT), q=(x,), k=(x,), v=(x,)))
        torch.testing.assert_close(out[0], x, atol=0.01, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_a_block_is_one_piece_of_little_more_than_a_byte_a_number(dim: int, dtype: torch.dtype) -> None:
    spec, context = AttentionSpec(0, 8, 2, dim, 1.0), AttentionContext(torch.device("cpu"), dtype, 32)
    shape = twin(context).kv_shape(spec, 5)
    assert shape[0] == 5 and shape[1] * SUB == 32
    assert cache_format(shape, dtype) is Format.INT8
    assert bytes_per_token(shape, dtype) == 2 * 2 * (dim + 4)  # kv heads; keys and values; numbers and a scale
    plain = CpuPaged(CpuPaged.Settings(), context).kv_shape(spec, 5)
    assert cache_format(plain, dtype) is (Format.FLOAT32 if dtype == torch.float32 else Format.BFLOAT16)
    assert bytes_per_token(plain, dtype) == 2 * 2 * dim * dtype.itemsize
