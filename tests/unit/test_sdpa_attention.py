"""What torch_sdpa promises beyond the contract: how much it gathers, and exact row independence."""

from __future__ import annotations

import pytest
import torch

from core.model.interface import AttentionContext, AttentionSpec
from core.testing.attention import make_sequences, naive_attention, run_backend
from core.testing.batches import Share, batch_of
from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TILE, Scratch, TorchSdpa, Variant, padded_length

BLOCK = 16
CONTEXT = AttentionContext(torch.device("cpu"), torch.float32, BLOCK)
FULL = AttentionSpec(0, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)
LOCAL = AttentionSpec(1, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, sliding_window=20)


def backend() -> TorchSdpa:
    return TorchSdpa(TorchSdpaSettings(), CONTEXT)


def decode(request: str, length: int, first_block: int) -> Share:
    table = list(range(first_block, first_block + -(-length // BLOCK)))
    return Share(request, [0] * length, length - 1, 1, table)


def test_padded_length_is_a_step_function_with_bounded_waste() -> None:
    lengths = [padded_length(length) for length in range(1, 3000)]
    assert lengths == sorted(lengths)
    assert all(length <= padded <= max(16, length * 3 // 2) for length, padded in enumerate(lengths, start=1))
    assert len(set(lengths)) < 20


def test_a_short_decode_is_not_padded_to_a_long_one() -> None:
    batch = batch_of([decode("a", 1000, 0), decode("b", 20, 70), decode("c", 22, 80)], BLOCK)
    plan = backend().prepare(batch, [FULL]).plans[Variant.of(FULL)]
    assert sorted((group.num_tiles, group.mask.shape[-1]) for group in plan.gathered) == [(1, 1024), (2, 24)]


def test_a_window_gathers_only_what_it_needs() -> None:
    batch = batch_of([decode("a", 1000, 0)], BLOCK)
    plans = backend().prepare(batch, [FULL, LOCAL]).plans
    (group,) = plans[Variant.of(LOCAL)].gathered
    assert group.key_slots.tolist() == [*range(980, 1000), 999, 999, 999, 999]
    assert plans[Variant.of(FULL)].gathered[0].mask.shape[-1] == 1024


def test_layers_of_any_shape_share_the_scratch() -> None:
    scratch = Scratch()
    for num_slots, num_heads, dtype in ((9, 2, torch.float32), (40, 1, torch.float32), (5, 3, torch.bfloat16)):
        cache = torch.randn(64, 2, num_heads, 8).to(dtype)
        slots = torch.randint(0, 64, (num_slots,))
        assert torch.equal(scratch.gather(cache, slots), cache.index_select(0, slots))


def test_layers_of_one_kind_share_their_plan() -> None:
    specs = [AttentionSpec(layer, 4, 2, 32, 0.2, sliding_window=20 if layer % 6 else None) for layer in range(12)]
    assert len(backend().prepare(batch_of([decode("a", 40, 0)], BLOCK), specs).plans) == 2


@pytest.mark.parametrize("spec", [FULL, LOCAL], ids=["full", "window"])
def test_a_decode_is_bit_equal_alone_and_batched(spec: AttentionSpec) -> None:
    sequences = make_sequences(spec, ((40, 1), (39, 1), (7, 1), (300, 1), (0, 30), (41, 1)), CONTEXT)
    together = run_backend(backend(), spec, sequences, CONTEXT)
    for index, out in enumerate(together):
        assert torch.equal(run_backend(backend(), spec, sequences.only(index), CONTEXT)[0], out)


@pytest.mark.parametrize("spec", [FULL, LOCAL], ids=["full", "window"])
def test_prefill_longer_than_a_tile(spec: AttentionSpec) -> None:
    sequences = make_sequences(spec, ((3, 2 * TILE + 5),), CONTEXT)
    out = run_backend(backend(), spec, sequences, CONTEXT)[0]
    expected = naive_attention(spec, sequences.q[0][3:], sequences.k[0], sequences.v[0], 3)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
