"""Groups of layers with sliding windows, from the plan to the batch: nothing is read that is not there, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batch import ScheduledRequest, SchedulerOutput
from core.batching import BatchBuilder
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.cache.window_groups import WindowSize, num_blocks_needed
from core.kv_layout import KVLayout
from core.request import Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext
from core.testing.fake_loop import BLOCK_SIZE, assert_complete, fake_engine, random_requests
from core.testing.fakes import FakeDrafts, FakeEngine, Limits, assert_right_output, make_request

WINDOWS = (None, 40, 40, 9)
LIMITS = Limits(max_num_scheduled_tokens=48, max_num_running_reqs=6, max_model_len=256)


def poison(engine: FakeEngine) -> None:
    """Whatever is blank now was never written: reading it fails. (Not with a step in flight, which may read it still.)"""
    pool = engine.cache._pool  # type: ignore[attr-defined]
    kv = engine._model._kv.reshape(-1, BLOCK_SIZE)
    kv[[block for block in range(pool.num_blocks) if not pool.ref_count(block) and pool.node(block) is None]] = -1


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_blocks", [30, 60, 400])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_outputs_are_right_and_the_pool_is_whole(
    num_in_flight: int, drafts: bool, num_blocks: int, prefix_caching: bool
) -> None:
    preempted = 0
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(
            num_blocks,
            LIMITS,
            decode=FakeDrafts(4, rng.randrange(4)) if drafts else None,
            num_in_flight=num_in_flight,
            prefix_caching=prefix_caching,
            windows=WINDOWS,
        )
        requests = random_requests(rng, 25, 60)
        engine.add(*requests)
        engine.drain(None if num_in_flight else poison)
        assert_complete(engine, requests)
        preempted += len(engine.preempted)
        if prefix_caching and num_blocks == 400:
            assert any(request.num_cached_tokens for request in requests)
    assert preempted or num_blocks > 30


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    windows=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    num_blocks=st.integers(26, 80),
    budget=st.integers(8, 64),
    num_in_flight=st.integers(0, 1),
)
def test_any_windows_with_aborts_and_failures(
    seed: int, windows: Sequence[int], num_blocks: int, budget: int, num_in_flight: int
) -> None:
    rng = random.Random(seed)
    limits = Limits(max_num_scheduled_tokens=budget, max_num_running_reqs=4, max_model_len=100)
    engine = fake_engine(
        num_blocks,
        limits,
        decode=FakeDrafts(3, rng.randrange(3)) if seed % 3 == 0 else None,
        num_in_flight=num_in_flight,
        windows=(None, *windows),
    )
    requests = [request for request in random_requests(rng, 12, 30) if request.num_prompt_tokens < 60]
    engine.add(*requests)

    def meddle(engine: FakeEngine) -> None:
        if engine.requests and rng.random() < 0.1:
            engine.abort(rng.choice(list(engine.requests)))
        if engine.requests and rng.random() < 0.1:
            engine.failing.add(rng.choice(list(engine.requests)))
        if not num_in_flight:
            poison(engine)

    engine.drain(meddle)
    for request in requests:
        assert_right_output(request)


def test_one_group_is_what_it_was() -> None:
    """The slow twin: the same requests with all layers in one group give the same plans, as long as nothing is short."""
    plans = []
    for windows in ((None,), WINDOWS):
        engine = fake_engine(1000, LIMITS, windows=windows)
        requests = random_requests(random.Random(5), 20)
        engine.add(*requests)
        seen: list[tuple[tuple[str, int, int], ...]] = []
        while engine.requests:
            output = engine.step()
            seen.append(tuple((p.request.request_id, p.start, p.num_tokens) for p in output.scheduled))
        plans.append(seen)
    assert plans[0] == plans[1]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000), st.sampled_from([16, 32, 64]))
def test_most_blocks_of_a_window_and_a_step(window: int, step: int, start: int, block_size: int) -> None:
    size = WindowSize(window, step, block_size)
    held = -(-(start + step) // block_size) - size.first(start)
    assert held <= size.most
    worst = max(-(-(s + step) // block_size) - size.first(s) for s in range(window, window + 2 * block_size))
    assert worst == size.most, "no more is set aside than a step can need"


def test_the_longest_sequence_that_a_pool_holds() -> None:
    layout = KVLayout((None, 40, 40), 32, 16)
    for num_blocks in range(3, 100):
        tokens = layout.num_tokens(num_blocks)
        assert tokens % 16 == 0 and layout.num_needed(tokens) <= num_blocks < layout.num_needed(tokens + 16)
    assert KVLayout().num_tokens(7) == 7 * 16
    assert num_blocks_needed(1000, 16, (None,), 0) == 63


def twin_tables(request: Request, width: int) -> list[list[int]]:
    rows = []
    for table in request.group_tables:
        row = [-1] * table.first + list(table.blocks)
        rows.append(row + [-1] * (width - len(row)))
    return rows


def test_group_tables_of_batches_equal_those_built_anew() -> None:
    """Incrementally, over sliding, preemption, endings and growth of the buffer."""
    rng = random.Random(3)
    cache = PagedCache(PagedCache.Settings(), CacheContext(3000, 4096, 0, WINDOWS, 64))
    builder, live = BatchBuilder(16, 4096, len(WINDOWS)), list[Request]()
    for step in range(300):
        while len(live) < rng.randint(1, 24):
            request = make_request(f"r{step}-{len(live)}", range(rng.randint(1, 60)), 1, status=RequestStatus.RUNNING)
            assert cache.allocate(request, request.num_tokens)
            live.append(request)
        parts = []
        for request in rng.sample(live, rng.randint(1, len(live))):
            start = request.num_computed_tokens
            end = start + rng.choice([1, 1, 5, 64])
            assert cache.allocate(request, end)
            request.append_output([3] * max(end - request.num_tokens, 0))
            cache.slide(request, start, end)
            request.num_computed_tokens = end
            parts.append(ScheduledRequest(request, start, end - start))
        batch = builder.build(SchedulerOutput(step, tuple(parts)))
        assert batch.group_block_tables is not None and batch.group_slot_mappings is not None
        width = batch.block_table.shape[1]
        by_id = {part.request.request_id: part for part in parts}
        parts = [by_id[request_id] for request_id in batch.request_ids]
        expected = np.array([twin_tables(part.request, width) for part in parts]).swapaxes(0, 1)
        assert (batch.group_block_tables.numpy() == expected).all()
        slots = batch.group_slot_mappings.numpy()
        owners = np.repeat(np.arange(len(parts)), [part.num_tokens for part in parts])
        positions = batch.positions.numpy()
        assert (slots == expected[:, owners, positions // 16] * 16 + positions % 16).all()
        for request in [r for r in live if rng.random() < 0.05]:
            cache.free(request)
            if rng.random() < 0.5:
                request.num_preemptions += 1
                request.num_computed_tokens = 0
                assert cache.allocate(request, request.num_tokens)
            else:
                live.remove(request)
                request.status = RequestStatus.FINISHED_LENGTH
    cache.check()


class Greedy(Policy):
    """Reserves all that a request may ever have, as static batching does."""

    def num_reserved(self, request: Request) -> int:
        return request.num_prompt_tokens + request.params.max_tokens


def test_a_reservation_past_the_pool_is_what_the_pool_holds() -> None:
    """Or a request would wait for ever for blocks that are not there."""

    def scheduler(context: SchedulerContext, limits: Limits) -> QueueScheduler:
        settings = QueueSettings(
            max_num_scheduled_tokens=limits.max_num_scheduled_tokens, max_num_running_reqs=limits.max_num_running_reqs
        )
        return QueueScheduler(settings, context, Greedy())

    engine = fake_engine(20, LIMITS, scheduler=scheduler, windows=WINDOWS)
    requests = [make_request(f"r{index}", range(10 + index), 50 if index % 2 else 240) for index in range(4)]
    engine.add(*requests)
    engine.drain(poison)
    assert engine.ended.keys() == {request.request_id for request in requests}


def test_a_long_reservation_does_not_keep_windows_from_sliding() -> None:
    """`allocate` is called once, for all positions; tables move all the same."""
    cache = PagedCache(PagedCache.Settings(), CacheContext(300, 4096, 0, WINDOWS, 32))
    request = make_request("a", range(32), 900)
    assert cache.allocate(request, 900)
    for start in range(0, 896, 32):
        cache.slide(request, start, start + 32)
        assert sum(len(table.blocks) for table in request.group_tables) <= 2 * 6 + 4
    cache.check()
