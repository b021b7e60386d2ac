"""ADR 1: one fake for each thing that later work does to the engine, run through its real parts."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
import torch

from core.batch import ModelBatch, SampledRow, SamplerOutput, SamplingMetadata
from core.client import InlineClient
from core.model.interface import StepResult
from core.request import Request, SamplingParams
from core.testing.engines import engine_request, make_engine, paged_cache, scheduler_context
from core.testing.fakes import FakeDrafts, FakeEngine, expected_ids, make_request
from core.testing.harness.fake_executors import Done, FakeExecutor
from plugins.schedulers.fcfs import Fcfs

REQUESTS = [(f"r{i}", list(range(1 + i, 30 + 9 * i)), 6 + i) for i in range(6)]


def run(executor, decode=None) -> dict[str, list[int]]:
    settings = Fcfs.Settings(max_num_running_reqs=4)
    engine = make_engine(Fcfs, settings, executor, chunk_size=16, decode=decode and (lambda: decode))
    engine.add([engine_request(*request) for request in REQUESTS])
    out: dict[str, list[int]] = {}
    for _ in range(500):
        if not engine.has_work():
            break
        for delta in engine.step().deltas:
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    cache = engine._pipeline.cache
    cache.check()
    assert cache.num_free_blocks == cache.num_blocks
    return out


def oracle() -> dict[str, list[int]]:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, _, n in REQUESTS]
    return {key: expected_ids(Request(key, prompt, p)) for (key, prompt, _), p in zip(REQUESTS, params, strict=True)}


class ReplayExecutor(FakeExecutor):
    """A captured graph: batches are copied into fixed buffers, padded to a bucket, and only those buffers are read."""

    BUCKET = 128

    def allocate(self, num_blocks):
        super().allocate(num_blocks + 1)  # one block that padding may write to
        self._pad_slot = num_blocks * self.block_size
        self._ids = torch.zeros(self.BUCKET, dtype=torch.int64)
        self._positions = torch.zeros(self.BUCKET, dtype=torch.int64)
        self._slots = torch.full((self.BUCKET,), self._pad_slot, dtype=torch.int64)
        self.replays = 0

    def submit(self, batch: ModelBatch) -> Done:
        n = batch.num_tokens
        self._ids[:n].copy_(batch.input_ids)
        self._positions[:n].copy_(batch.positions)
        self._slots[:n].copy_(batch.slot_mapping)
        self._slots[n:] = self._pad_slot
        self.replays += 1
        return super().submit(
            replace(batch, input_ids=self._ids[:n], positions=self._positions[:n], slot_mapping=self._slots[:n])
        )


class WireBatch(msgspec.Struct, frozen=True):
    """A `ModelBatch` as bytes: what an executor on another rank or host would receive."""

    step: int
    tensors: dict[str, tuple[str, list[int], bytes]]
    sampled_rows: list[int]
    rows: list[tuple[str, SamplingParams, int, int, int, list[int], list[int], list[int]]]
    request_ids: list[str]
    num_prefill_tokens: int


TENSORS = ("input_ids", "positions", "query_start_loc", "seq_lens", "block_table", "slot_mapping", "logits_indices")


def pack(batch: ModelBatch) -> bytes:
    tensors = {name: getattr(batch, name).numpy() for name in TENSORS}
    rows = [
        (
            r.request_id,
            r.params,
            r.seed,
            r.choice,
            r.position,
            r.prompt_token_ids,
            r.output_token_ids,
            list(r.draft_token_ids),
        )
        for r in batch.sampling.rows
    ]
    return msgspec.msgpack.encode(
        WireBatch(
            batch.step,
            {name: (str(a.dtype), list(a.shape), a.tobytes()) for name, a in tensors.items()},
            list(batch.sampling.sampled_rows),
            rows,
            list(batch.request_ids),
            batch.num_prefill_tokens,
        )
    )


def unpack(data: bytes) -> ModelBatch:
    wire = msgspec.msgpack.decode(data, type=WireBatch)
    tensors = {
        name: torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
        if raw
        else torch.empty(shape)
        for name, (dtype, shape, raw) in wire.tensors.items()
    }
    rows = tuple(SampledRow(*row[:7], draft_token_ids=tuple(row[7])) for row in wire.rows)
    metadata = SamplingMetadata(tuple(wire.sampled_rows), rows)
    return ModelBatch(
        step=wire.step,
        sampling=metadata,
        request_ids=tuple(wire.request_ids),
        num_prefill_tokens=wire.num_prefill_tokens,
        **tensors,
    )


class RanksExecutor:
    """Several ranks run every batch from its bytes; the first one's answer counts, and all must agree."""

    def __init__(self, num_ranks: int = 2):
        self.ranks = [FakeExecutor() for _ in range(num_ranks)]
        self.threads = ThreadPoolExecutor(num_ranks)
        self.broken = False

    @property
    def device(self):
        return self.ranks[0].device

    @property
    def dtype(self):
        return self.ranks[0].dtype

    def free_memory(self):
        return min(rank.free_memory() for rank in self.ranks)

    def kv_bytes_per_block(self):
        return self.ranks[0].kv_bytes_per_block()

    def allocate(self, num_blocks):
        for rank in self.ranks:
            rank.allocate(num_blocks)

    def submit(self, batch):
        data = pack(batch)
        return Gathered([self.threads.submit(self._run, rank, data) for rank in self.ranks])

    def _run(self, rank: FakeExecutor, data: bytes) -> SamplerOutput:
        if self.broken:
            raise ConnectionError("rank 1 is gone")
        return rank.submit(unpack(data)).result().sampled

    def forget(self, request_ids):
        for rank in self.ranks:
            rank.forget(request_ids)

    def close(self):
        self.threads.shutdown()


class Gathered:
    def __init__(self, futures: list[Future]):
        self._futures = futures

    def result(self) -> StepResult:
        outputs = [future.result() for future in self._futures]
        assert all(output.token_ids == outputs[0].token_ids for output in outputs)
        return StepResult(outputs[0])


def test_overlap_update_may_come_one_step_late():
    context = scheduler_context(paged_cache(64), chunk_size=16)
    engine = FakeEngine(Fcfs(Fcfs.Settings(max_num_running_reqs=4), context), context.cache, num_in_flight=1)
    requests = [make_request(*request) for request in REQUESTS]
    engine.add(*requests)
    engine.drain()
    assert {r.request_id: r.output_token_ids for r in requests} == oracle()
    context.cache.check()


def test_speculation_several_logits_rows_per_request():
    assert run(FakeExecutor(), decode=FakeDrafts(num_drafts=3, num_wrong=1)) == oracle()


def test_native_step_or_captured_graph_runs_a_whole_batch():
    executor = ReplayExecutor()
    assert run(executor) == oracle()
    assert executor.replays > 10


def test_ranks_see_bytes_and_agree():
    assert run(RanksExecutor()) == oracle()


def test_a_lost_rank_fails_the_requests_of_its_step_and_nothing_else():
    executor = RanksExecutor()
    engine = make_engine(Fcfs, Fcfs.Settings(), executor)
    executor.broken = True
    engine.add([engine_request("a", [1, 2, 3])])
    (delta,) = engine.step().deltas
    assert "rank 1 is gone" in delta.error
    executor.broken = False
    engine.add([engine_request("b", [1, 2, 3])])
    assert engine.step().deltas[0].token_ids


@pytest.mark.parametrize("_round", range(2))
async def test_an_engine_behind_the_client_interface_is_not_seen(_round):
    """The same interface with the engine in this process; the process client runs the same contract suite."""
    client = InlineClient(lambda: make_engine(Fcfs, Fcfs.Settings(), FakeExecutor()))
    await client.start(lambda *_: None)
    client.send_add([engine_request(*request) for request in REQUESTS])
    out: dict[str, list[int]] = {}
    while sum(map(len, out.values())) < sum(map(len, oracle().values())):
        for delta in (await client.receive()).deltas:
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert out == oracle()
    await client.close()
