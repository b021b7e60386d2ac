"""Batches against a slow twin that loops over every token, in steps that a real scheduler plans."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from core.batch import ModelBatch, ScheduledRequest, SchedulerOutput
from core.batching import BatchBuilder
from core.block_tables import BlockTableRows
from core.request import RequestStatus, SamplingParams
from core.testing.fakes import FakeDrafts, FakeEngine, make_request
from core.testing.scheduler import SchedulerChecks
from plugins.schedulers.fcfs import Fcfs

RUNNING = RequestStatus.RUNNING


def slow_twin(parts: Sequence[ScheduledRequest], block_size: int) -> dict[str, list]:
    """Every field of the batch by plain loops, of parts in the batch's order."""
    made: dict[str, list] = {key: [] for key in ("ids", "positions", "slots", "tables", "seq_lens", "logits", "starts")}
    for part in parts:
        request = part.request
        first = len(made["ids"])
        made["starts"].append(first)
        made["seq_lens"].append(part.start + part.num_tokens)
        made["tables"].append(list(request.block_table))
        known = request.prompt_token_ids + request.output_token_ids
        for index in range(part.num_tokens):
            position = part.start + index
            draft = index - (part.num_tokens - part.num_drafts)
            if draft >= 0:
                made["ids"].append(request.draft_token_ids[draft])
            else:
                made["ids"].append(known[position] if position < len(known) else -1)
            made["positions"].append(position)
            made["slots"].append(request.block_table[position // block_size] * block_size + position % block_size)
            scored = request.params.prompt_logprobs is not None and position < request.num_prompt_tokens - 1
            sampled = part.samples and index >= part.num_tokens - part.num_drafts - 1
            if scored or sampled:
                made["logits"].append(first + index)
    return made


def assert_equal_to_slow_twin(output: SchedulerOutput, batch: ModelBatch, block_size: int) -> None:
    by_id = {part.request.request_id: part for part in output.scheduled}
    assert len(batch.request_ids) == len(by_id) == len(output.scheduled)
    slow = slow_twin([by_id[request_id] for request_id in batch.request_ids], block_size)
    assert batch.input_ids.tolist() == slow["ids"]
    assert batch.positions.tolist() == slow["positions"]
    assert batch.slot_mapping.tolist() == slow["slots"]
    assert batch.seq_lens.tolist() == slow["seq_lens"]
    assert batch.query_start_loc.tolist() == [*slow["starts"], len(slow["ids"])]
    assert batch.logits_indices.tolist() == slow["logits"]
    width = max(map(len, slow["tables"]))
    assert batch.block_table.tolist() == [table + [-1] * (width - len(table)) for table in slow["tables"]]
    assert list(batch.token_sources) == [index for index, token in enumerate(slow["ids"]) if token == -1]
    assert (
        str(batch.block_table.dtype) == str(batch.query_start_loc.dtype) == str(batch.seq_lens.dtype) == "torch.int32"
    )
    assert str(batch.slot_mapping.dtype) == str(batch.logits_indices.dtype) == "torch.int64"


class TestAgainstSlowTwin(SchedulerChecks):
    component = Fcfs

    @pytest.mark.parametrize("num_blocks", [10, 80])
    @pytest.mark.parametrize(
        "options", [{}, {"num_in_flight": 1}, {"decode": FakeDrafts(3, 1)}], ids=["", "overlap", "drafts"]
    )
    def test_every_step(self, num_blocks: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
        engine: FakeEngine = self.make_engine(num_blocks, **options)
        build, checked = engine._builder.build, []

        def build_and_compare(output: SchedulerOutput) -> ModelBatch:
            batch = build(output)
            assert_equal_to_slow_twin(output, batch, engine.cache.block_size)
            checked.append(batch)
            return batch

        monkeypatch.setattr(engine._builder, "build", build_and_compare)
        requests = self.random_requests(random.Random(num_blocks), 24)
        for index, request in enumerate(requests):
            if index % 5 == 0:
                request.params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)
        assert len(checked) > 20
        assert any(batch.token_sources for batch in checked) == ("num_in_flight" in options)


def part(prompt: int, start: int, count: int, **options: object) -> ScheduledRequest:
    fields = {key: options.pop(key) for key in ("params", "draft_token_ids", "output_token_ids") if key in options}
    request = make_request(f"r{prompt}-{start}", range(100, 100 + prompt), block_table=list(range(8)), **fields)
    return ScheduledRequest(request, start, count, **options)  # type: ignore[arg-type]


def test_prompt_rows_predict_the_next_prompt_token() -> None:
    scored = SamplingParams(prompt_logprobs=3)
    output = SchedulerOutput(1, (part(6, 0, 4, params=scored, samples=False), part(5, 2, 3, params=scored)))
    batch = BatchBuilder(16, 128).build(output)
    first, second = batch.sampling.prompt_rows
    assert (first.rows, first.target_ids, first.num_logprobs) == ((0, 1, 2, 3), (101, 102, 103, 104), 3)
    assert (second.rows, second.target_ids) == ((4, 5), (103, 104))
    assert batch.sampling.sampled_rows == (6,)
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [row.position for row in batch.sampling.rows] == [0]
    assert batch.num_prefill_tokens == 7


def test_a_resumed_request_scores_its_prompt_only() -> None:
    resumed = part(3, 0, 5, params=SamplingParams(prompt_logprobs=0), output_token_ids=[7, 8])
    batch = BatchBuilder(16, 128).build(SchedulerOutput(1, (resumed,)))
    assert batch.sampling.prompt_rows[0].target_ids == (101, 102)
    assert batch.logits_indices.tolist() == [0, 1, 4]
    assert batch.sampling.rows[0].position == 2


def test_drafts_get_a_row_each() -> None:
    drafted = part(3, 3, 4, num_drafts=3, draft_token_ids=[7, 8, 9], output_token_ids=[5])
    batch = BatchBuilder(16, 128).build(SchedulerOutput(1, (part(2, 0, 2), drafted)))
    assert batch.input_ids.tolist() == [100, 101, 5, 7, 8, 9]
    assert batch.logits_indices.tolist() == [1, 2, 3, 4, 5]
    rows = batch.sampling.rows[1:]
    assert [(row.position, row.draft_token_ids) for row in rows] == [(1, ()), (2, (7,)), (3, (7, 8)), (4, (7, 8, 9))]


def test_a_step_of_chunks_has_no_logits_rows() -> None:
    batch = BatchBuilder(16, 128).build(SchedulerOutput(1, (part(30, 0, 8, samples=False),)))
    assert batch.logits_indices.shape == (0,)
    assert (batch.sampling.rows, batch.num_tokens, batch.num_requests) == ((), 8, 1)


def test_an_empty_plan_makes_an_empty_batch() -> None:
    batch = BatchBuilder(16, 128).build(SchedulerOutput(1))
    assert (batch.num_tokens, batch.num_requests, batch.query_start_loc.tolist()) == (0, 0, [0])


def test_rows_of_the_table_buffer_follow_requests() -> None:
    """Growth in both directions, requests that leave, an id used again, a new table after preemption, rows recycled."""
    rng = random.Random(0)
    rows = BlockTableRows(max_blocks=200)
    live = {f"r{index}": make_request(f"r{index}", [1], status=RUNNING) for index in range(40)}
    for step in range(300):
        name = rng.choice(sorted(live))
        event = rng.random()
        if event < 0.1:
            live[name].status = live[name].status.FINISHED_STOPPED
            live[name] = make_request(name, [1], status=RUNNING)
        elif event < 0.3:
            live[name].block_table.clear()
            live[name].num_preemptions += 1
        for request in rng.sample(sorted(live.values(), key=lambda request: request.request_id), 20):
            request.block_table += [rng.randrange(1000) for _ in range(rng.randrange(3))]
        chosen = rng.sample(sorted(live.values(), key=lambda request: request.request_id), rng.randint(1, 40))
        indices, table = rows.gather(chosen)
        assert sorted(indices) == list(range(len(chosen)))
        for index, request in zip(indices, chosen, strict=True):
            row = table[index]
            assert row[: len(request.block_table)].tolist() == request.block_table, step
            assert (row[len(request.block_table) :] == -1).all()
    assert len(rows._rows) <= 41
    assert rows._buffer.shape[0] <= 64


def test_a_steady_step_copies_no_table() -> None:
    rows = BlockTableRows(max_blocks=200)
    requests = [make_request(f"r{index}", [1], status=RUNNING, block_table=[index] * 9) for index in range(20)]
    rows.gather(requests)
    requests[3].status = RequestStatus.PREEMPTED
    left = [request for request in requests if request is not requests[3]]
    indices, table = rows.gather(left[::-1])
    assert sorted(indices) == list(range(19)) and np.shares_memory(table, rows._buffer)
    assert [table[index][0] for index in indices] == [request.block_table[0] for request in left[::-1]]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_a_batch_in_flight_stays_as_it_was(num_in_flight: int) -> None:
    builder = BatchBuilder(16, 128, num_in_flight=num_in_flight)
    request = make_request("a", range(100), block_table=[1, 2])
    in_flight = []
    for step in range(12):
        request.block_table[:] = [step, step + 1, step + 2][: 1 + step % 3]
        request.num_preemptions = step
        batch = builder.build(SchedulerOutput(step, (ScheduledRequest(request, 0, 2),)))
        in_flight.append((batch, list(request.block_table)))
        for older, table in in_flight[-1 - num_in_flight :]:
            assert older.block_table[0].tolist() == table


def test_a_batch_is_not_changed_by_the_next_one() -> None:
    builder = BatchBuilder(16, 128)
    scheduled = part(2, 0, 2)
    batch = builder.build(SchedulerOutput(1, (scheduled,)))
    before = batch.block_table.clone()
    scheduled.request.block_table[:] = [5] * 8
    scheduled.request.num_preemptions = 1
    builder.build(SchedulerOutput(2, (scheduled,)))
    assert np.array_equal(batch.block_table.numpy(), before.numpy())
