"""What every attention backend must do, as tests, and a naive twin to compare with::

class TestMine(AttentionContract):
    component = Mine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from core.batch import ModelBatch
from core.model.interface import AttentionBackend, AttentionContext, AttentionSpec
from core.testing.batches import Share, batch_of
from core.testing.contract import Contract
from core.testing.host_reads import HostReads

NUM_BLOCKS_SPARE = 3  # blocks of the pool that no request owns


def naive_attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """One request, one query and one head at a time, in float32: the slow twin of every backend.

    q [t, num_heads, head_dim] at positions start…; k, v [start + t, num_kv_heads, head_dim] of the whole sequence.
    """
    out = torch.empty(q.shape, dtype=torch.float32)
    group = spec.num_heads // spec.num_kv_heads
    for row in range(q.shape[0]):
        position = start + row
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        for head in range(spec.num_heads):
            keys = k[first : position + 1, head // group].float()
            scores = keys @ q[row, head].float() * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out[row, head] = scores.softmax(0) @ v[first : position + 1, head // group].float()
    return out


@dataclass(frozen=True, slots=True)
class Sequences:
    """Random q, k, v of some requests: the first `computed` positions are cached before the batch under test."""

    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    q: tuple[Tensor, ...]  # [computed + scheduled, num_heads, head_dim] each
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    tables: tuple[list[int], ...]
    num_blocks: int

    def batch(self, starts: Sequence[int], counts: Sequence[int], block_size: int) -> ModelBatch:
        shares = [
            Share(str(index), [0] * (start + count), start, count, self.tables[index])
            for index, (start, count) in enumerate(zip(starts, counts, strict=True))
            if count
        ]
        return batch_of(shares, block_size, table_width=max(map(len, self.tables)) + 1)

    def only(self, index: int) -> Sequences:
        """One of the requests, in the same pool and blocks."""
        part = slice(index, index + 1)
        return Sequences(
            self.computed[part],
            self.scheduled[part],
            self.q[part],
            self.k[part],
            self.v[part],
            self.tables[part],
            self.num_blocks,
        )

    def rows(self, tensors: Sequence[Tensor], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        return torch.cat([t[s : s + c] for t, s, c in zip(tensors, starts, counts, strict=True)])


def make_sequences(
    spec: AttentionSpec, lengths: Sequence[tuple[int, int]], context: AttentionContext, seed: int = 0
) -> Sequences:
    """`lengths`: (computed, scheduled) of each request. Block tables are a random permutation of the pool."""
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> tuple[Tensor, ...]:
        shapes = [(computed + scheduled, heads, spec.head_dim) for computed, scheduled in lengths]
        return tuple(torch.randn(shape, generator=generator).to(context.device, context.dtype) for shape in shapes)

    needed = [-(-(computed + scheduled) // context.block_size) for computed, scheduled in lengths]
    num_blocks = sum(needed) + NUM_BLOCKS_SPARE
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = tuple([free.pop() for _ in range(count)] for count in needed)
    computed, scheduled = zip(*lengths, strict=True)
    q, k, v = random(spec.num_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)
    return Sequences(computed, scheduled, q, k, v, tables, num_blocks)


def run_backend(
    backend: AttentionBackend, spec: AttentionSpec, sequences: Sequences, context: AttentionContext
) -> list[Tensor]:
    """Cache the computed positions in a first batch, run the scheduled ones in a second; its output by request.

    The cache starts full of NaN, so that a read of a slot that was not written shows.
    """
    shape = backend.kv_shape(spec, sequences.num_blocks)
    cache = torch.full(shape, float("nan"), dtype=context.dtype, device=context.device)
    zeros = [0] * len(sequences.computed)
    out = torch.empty(0)
    for starts, counts in ((zeros, sequences.computed), (sequences.computed, sequences.scheduled)):
        if not any(counts):
            continue
        batch = sequences.batch(starts, counts, context.block_size)
        metadata = backend.prepare(batch, [spec])
        q, k, v = (sequences.rows(part, starts, counts) for part in (sequences.q, sequences.k, sequences.v))
        out = backend.forward(spec, q, k, v, cache, metadata)
    ends = list(accumulate(sequences.scheduled))
    return [out[end - count : end] for end, count in zip(ends, sequences.scheduled, strict=True)]


MIXED = ((0, 1), (0, 19), (5, 1), (40, 1), (37, 26), (64, 1), (15, 1), (31, 3), (90, 1), (16, 16))
LENGTHS = {
    "decodes": ((33, 1), (1, 1), (70, 1), (16, 1)),
    "prefills": ((0, 50), (0, 3), (0, 16)),
    "chunks": ((16, 20), (7, 41), (48, 16)),
    "mixed": MIXED,
}
SPECS = {
    "plain": AttentionSpec(0, num_heads=4, num_kv_heads=4, head_dim=32, scale=0.2),
    "grouped": AttentionSpec(0, num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125),
    "one_kv_head": AttentionSpec(0, num_heads=4, num_kv_heads=1, head_dim=128, scale=0.09),
    "window": AttentionSpec(0, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, sliding_window=13),
    "window_of_one": AttentionSpec(0, num_heads=2, num_kv_heads=2, head_dim=32, scale=0.2, sliding_window=1),
    "softcap": AttentionSpec(0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.3, softcap=2.0),
    "window_softcap": AttentionSpec(
        0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.3, sliding_window=20, softcap=3.0
    ),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class AttentionContract(Contract):
    """Set `device` and `dtypes` where they differ."""

    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def make_backend(self, context: AttentionContext) -> AttentionBackend:
        backend: AttentionBackend = self.make(context)
        return backend

    def needs_of(self, *specs: AttentionSpec) -> None:
        """Windows and caps are asked of those who provide them."""
        self.needs(*(["sliding_window"] if any(spec.sliding_window is not None for spec in specs) else []))
        self.needs(*(["softcap"] if any(spec.softcap is not None for spec in specs) else []))

    def context(self, dtype: torch.dtype = torch.float32, block_size: int = 16) -> AttentionContext:
        return AttentionContext(torch.device(self.device), dtype, block_size)

    def _compare(
        self, spec: AttentionSpec, lengths: Sequence[tuple[int, int]], context: AttentionContext, seed: int = 0
    ) -> None:
        self.needs_of(spec)
        sequences = make_sequences(spec, lengths, context, seed)
        outputs = run_backend(self.make_backend(context), spec, sequences, context)
        for index, out in enumerate(outputs):
            start = sequences.computed[index]
            q, k, v = (part[index].cpu() for part in (sequences.q, sequences.k, sequences.v))
            expected = naive_attention(spec, q[start:], k, v, start)
            assert out.dtype == context.dtype
            torch.testing.assert_close(out.float().cpu(), expected, atol=TOLERANCE[context.dtype], rtol=1e-2)

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("spec", SPECS)
    def test_equals_the_naive_twin(self, spec: str, lengths: str) -> None:
        for dtype in self.dtypes:
            self._compare(SPECS[spec], LENGTHS[lengths], self.context(dtype))

    @pytest.mark.parametrize("block_size", [16, 32, 64])
    @pytest.mark.parametrize("spec", ["grouped", "window"])
    def test_block_sizes(self, spec: str, block_size: int) -> None:
        self._compare(SPECS[spec], MIXED, self.context(block_size=block_size), seed=block_size)

    @pytest.mark.parametrize("spec", ["grouped", "window", "softcap"])
    def test_long_prefill_in_one_chunk_and_after_a_context(self, spec: str) -> None:
        self._compare(SPECS[spec], ((0, 300), (10, 290), (299, 1)), self.context())

    def test_layers_with_different_specs_share_a_batch(self) -> None:
        """`prepare` sees all layers once; each `forward` picks what its own layer needs."""
        context = self.context()
        full, local = SPECS["grouped"], AttentionSpec(1, 6, 2, 64, 0.125, sliding_window=13)
        self.needs_of(full, local)
        sequences = make_sequences(full, MIXED, context)
        alone = [run_backend(self.make_backend(context), spec, sequences, context) for spec in (full, local)]
        backend = _Together(self.make_backend(context), (full, local))
        together = [run_backend(backend, spec, sequences, context) for spec in (full, local)]
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(torch.cat(a), torch.cat(b), atol=0.0, rtol=0.0)

    @pytest.mark.parametrize("spec", ["grouped", "window", "softcap"])
    def test_a_request_does_not_depend_on_its_batch_mates(self, spec: str) -> None:
        self.needs_of(SPECS[spec])
        context, backend = self.context(), self.make_backend(self.context())
        sequences = make_sequences(SPECS[spec], MIXED, context)
        together = run_backend(backend, SPECS[spec], sequences, context)
        for index in range(len(MIXED)):
            alone = run_backend(backend, SPECS[spec], sequences.only(index), context)[0]
            torch.testing.assert_close(together[index], alone, atol=2e-6, rtol=1e-5)

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_forward_reads_no_values_on_the_host(self, lengths: str) -> None:
        """It is graph-safe: all planning is `prepare`'s, once per batch and not per layer."""
        spec, context = SPECS["grouped"], self.context()
        backend, sequences = self.make_backend(context), make_sequences(SPECS["grouped"], LENGTHS[lengths], context)
        cache = torch.zeros(backend.kv_shape(spec, sequences.num_blocks), dtype=context.dtype, device=context.device)
        batch = sequences.batch(sequences.computed, sequences.scheduled, context.block_size)
        metadata = backend.prepare(batch, [spec])
        parts = (sequences.q, sequences.k, sequences.v)
        q, k, v = (sequences.rows(part, sequences.computed, sequences.scheduled) for part in parts)
        with HostReads() as reads:
            backend.forward(spec, q, k, v, cache, metadata)
        assert not reads.found, (
            f"forward calls Tensor.{reads.found[0]}: plan in `prepare`, which is called once per batch"
        )

    @pytest.mark.parametrize("spec", ["window", "window_of_one", "window_softcap"])
    def test_blocks_before_all_windows_are_not_read(self, spec: str) -> None:
        """They are given back, and -1 in the table; another group of layers has written to the same cache since."""
        self.needs("window_groups")
        self.needs_of(SPECS[spec])
        one, context, lengths = SPECS[spec], self.context(), ((90, 1), (37, 26), (64, 300), (0, 50))
        backend, sequences = self.make_backend(context), make_sequences(SPECS[spec], lengths, context)
        shape = backend.kv_shape(one, sequences.num_blocks)
        cache = torch.full(shape, float("nan"), dtype=context.dtype, device=context.device)
        parts = (sequences.q, sequences.k, sequences.v)
        zeros = [0] * len(lengths)
        before = [sequences.rows(part, zeros, sequences.computed) for part in parts]
        first = sequences.batch(zeros, sequences.computed, context.block_size)
        backend.forward(one, before[0], before[1], before[2], cache, backend.prepare(first, [one]))
        num_gone = [max(start - (one.sliding_window or 0) + 1, 0) // context.block_size for start in sequences.computed]
        gone = [block for table, count in zip(sequences.tables, num_gone, strict=True) for block in table[:count]]
        assert gone
        count = len(gone) * context.block_size
        poison = batch_of([Share("x", [0] * count, 0, count, gone)], context.block_size)
        q, k = before[0][:1].repeat(count, 1, 1), torch.full_like(before[1][:1].repeat(count, 1, 1), float("nan"))
        backend.forward(one, q, k, k, cache, backend.prepare(poison, [one]))
        tables = tuple([-1] * count + table[count:] for table, count in zip(sequences.tables, num_gone, strict=True))
        batch = replace(sequences, tables=tables).batch(sequences.computed, sequences.scheduled, context.block_size)
        q, k, v = (sequences.rows(part, sequences.computed, sequences.scheduled) for part in parts)
        out = backend.forward(one, q, k, v, cache, backend.prepare(batch, [one]))
        expected = [
            naive_attention(one, q[start:].cpu(), k.cpu(), v.cpu(), start)
            for start, q, k, v in zip(sequences.computed, *parts, strict=True)
        ]
        torch.testing.assert_close(out.float().cpu(), torch.cat(expected), atol=2e-5, rtol=1e-2)

    def test_q_k_and_v_are_left_as_they_are(self) -> None:
        spec, context = SPECS["grouped"], self.context()
        backend, sequences = self.make_backend(context), make_sequences(SPECS["grouped"], ((0, 30), (0, 1)), context)
        cache = torch.zeros(backend.kv_shape(spec, sequences.num_blocks), dtype=context.dtype, device=context.device)
        metadata = backend.prepare(sequences.batch((0, 0), (30, 1), context.block_size), [spec])
        given = [torch.cat(part) for part in (sequences.q, sequences.k, sequences.v)]
        kept = [tensor.clone() for tensor in given]
        backend.forward(spec, given[0], given[1], given[2], cache, metadata)
        for before, after in zip(kept, given, strict=True):
            assert torch.equal(before, after)

    def test_a_prefix_shared_by_two_requests_is_read_by_both(self) -> None:
        """Two block tables that begin with the same block, as after a prefix cache hit."""
        spec, context = SPECS["grouped"], self.context()
        sequences = make_sequences(spec, ((16, 5), (16, 9)), context)
        k, v = ([part[0], torch.cat((part[0][:16], part[1][16:]))] for part in (sequences.k, sequences.v))
        backend, tables = self.make_backend(context), [[4, 2], [4, 7]]
        shape = backend.kv_shape(spec, 8)
        cache = torch.full(shape, float("nan"), dtype=context.dtype, device=context.device)
        first = batch_of([Share("a", [0] * 16, 0, 16, tables[0])], context.block_size)
        backend.forward(spec, sequences.q[0][:16], k[0][:16], v[0][:16], cache, backend.prepare(first, [spec]))
        shares = [Share("a", [0] * 21, 16, 5, tables[0]), Share("b", [0] * 25, 16, 9, tables[1])]
        q, keys, values = (torch.cat([part[16:] for part in parts]) for parts in (sequences.q, k, v))
        metadata = backend.prepare(batch_of(shares, context.block_size), [spec])
        out = backend.forward(spec, q, keys, values, cache, metadata)
        expected = [naive_attention(spec, sequences.q[i][16:].cpu(), k[i].cpu(), v[i].cpu(), 16) for i in range(2)]
        torch.testing.assert_close(out.float().cpu(), torch.cat(expected), atol=2e-5, rtol=1e-3)

    def test_blocks_can_be_moved_one_by_one(self) -> None:
        """Of those who provide `blocks_first`: a block's rows are all that there is of it."""
        self.needs("blocks_first")
        spec, context = SPECS["grouped"], self.context()
        sequences, backend = make_sequences(spec, ((40, 3),), context), self.make_backend(context)
        shape = backend.kv_shape(spec, 8)
        assert shape[0] == 8 * backend.kv_shape(spec, 1)[0]
        assert shape[1:] == backend.kv_shape(spec, 1)[1:]
        cache = torch.full(shape, float("nan"), dtype=context.dtype, device=context.device)
        q, k, v = (part[0] for part in (sequences.q, sequences.k, sequences.v))
        first = batch_of([Share("a", [0] * 40, 0, 40, [4, 2, 1])], context.block_size)
        backend.forward(spec, q[:40], k[:40], v[:40], cache, backend.prepare(first, [spec]))
        blocks = cache.view(8, -1)
        moved = torch.full_like(blocks, float("nan"))
        moved[[0, 7, 3]] = blocks[[4, 2, 1]]
        then = batch_of([Share("a", [0] * 43, 40, 3, [0, 7, 3])], context.block_size)
        out = backend.forward(spec, q[40:], k[40:], v[40:], moved.view(shape), backend.prepare(then, [spec]))
        expected = naive_attention(spec, q[40:].cpu(), k.cpu(), v.cpu(), 40)
        torch.testing.assert_close(out.float().cpu(), expected, atol=2e-5, rtol=1e-3)

    def test_a_step_run_twice_gives_the_same(self) -> None:
        """KV writes are idempotent: the engine may repeat a failed step."""
        spec, context = SPECS["grouped"], self.context()
        backend, sequences = self.make_backend(context), make_sequences(SPECS["grouped"], ((0, 30), (0, 1)), context)
        cache = torch.zeros(backend.kv_shape(spec, sequences.num_blocks), dtype=context.dtype, device=context.device)
        metadata = backend.prepare(sequences.batch((0, 0), (30, 1), context.block_size), [spec])
        q, k, v = (torch.cat(part) for part in (sequences.q, sequences.k, sequences.v))
        first = backend.forward(spec, q, k, v, cache, metadata).clone()
        torch.testing.assert_close(backend.forward(spec, q, k, v, cache, metadata), first, atol=0.0, rtol=0.0)


class _Together:
    """Prepares for all `specs`, whichever layer asks."""

    def __init__(self, backend: AttentionBackend, specs: Sequence[AttentionSpec]):
        self._backend = backend
        self._specs = specs
        self.kv_shape = backend.kv_shape
        self.forward = backend.forward

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> object:
        return self._backend.prepare(batch, self._specs)
