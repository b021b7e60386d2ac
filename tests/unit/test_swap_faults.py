"""Swapping in an engine, and what goes wrong with it (F52): nobody is lost, and all answers are those of a solo run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from core.cache.kv_cache import CacheContext, KVCopy
from core.cache.paged import PagedCache
from core.engine import Engine
from core.isolation.cache import GuardedCache
from core.isolation.faults import Faults, StageError
from core.request import FinishReason, Request
from core.scheduling.policy import QueueSettings
from core.testing.engines import MAX_MODEL_LEN, engine_request, make_engine
from core.testing.fake_loop import fake_engine, fcfs, random_requests
from core.testing.fakes import FakeDrafts, Limits, assert_right_output, make_request
from core.testing.harness.engine_isolation import NAMES, Answers, assert_solo, run, solo
from core.testing.harness.fake_executors import FakeExecutor

NUM_BLOCKS = 9  # for two and a half of the longest requests
SETTINGS = QueueSettings(max_num_scheduled_tokens=64, max_num_running_reqs=8)


def engine_of(executor: FakeExecutor, num_swap_blocks: int = 40, **options: Any) -> Engine:
    options.setdefault("faults", Faults(NAMES))
    return make_engine(
        fcfs, SETTINGS, executor, num_blocks=NUM_BLOCKS, num_swap_blocks=num_swap_blocks, chunk_size=24, **options
    )


def requests(count: int = 12) -> list[Any]:
    head = list(range(32))
    return [engine_request(f"r{i}", (head if i % 2 else []) + [i] * (1 + i), max_tokens=30 + i) for i in range(count)]


def assert_whole(engine: Engine, num_swap_blocks: int = 40) -> None:
    engine.step()
    stats = engine.step().stats
    assert (stats.running, stats.waiting, stats.swapped) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total == NUM_BLOCKS
    assert stats.swap_blocks_free == stats.swap_blocks_total == num_swap_blocks
    engine._pipeline.cache.check()


def directions(executor: FakeExecutor) -> set[str]:
    return {copy.direction for copy in executor.copies}


def test_answers_are_those_of_a_solo_run_and_the_pools_are_whole_after() -> None:
    executor = FakeExecutor()
    engine, sent = engine_of(executor), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert directions(executor) == {"out", "in"}
    assert answers.incidents == []
    assert_whole(engine)


def test_numbers_of_swapping_are_told_step_by_step() -> None:
    executor = FakeExecutor()
    engine = engine_of(executor)
    engine.add(requests())
    num_out = num_in = most_swapped = 0
    least_free = 40
    while engine.has_work():
        stats = engine.step().stats
        num_out += stats.num_swapped_out_blocks
        num_in += stats.num_swapped_in_blocks
        most_swapped, least_free = max(most_swapped, stats.swapped), min(least_free, stats.swap_blocks_free)
    moved = [(copy.direction, len(copy.host_blocks)) for copy in executor.copies]
    assert num_out == sum(count for direction, count in moved if direction == "out") > 0
    assert num_in == sum(count for direction, count in moved if direction == "in") > 0
    assert most_swapped > 0
    assert least_free < 40


@pytest.mark.parametrize("num_swap_blocks", [1, 2, 5])
def test_a_full_host_pool_falls_back_to_computing_again(num_swap_blocks: int) -> None:
    executor = FakeExecutor()
    engine, sent = engine_of(executor, num_swap_blocks), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert any(delta.num_preemptions for request in sent for delta in answers.deltas[request.request_id])
    assert_whole(engine, num_swap_blocks)


@pytest.mark.parametrize("num_in_flight", [0, 1, 2], ids=["synchronous", "overlap", "deep overlap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_any_mix_gives_the_answers_of_solo_runs(num_in_flight: int, prefix_caching: bool) -> None:
    """Arrivals, aborts, failures and drafts over tiny pools; `FakeEngine` checks the books after each step."""
    copied: Counter[str] = Counter()
    for seed in range(12):
        rng = random.Random(seed)
        engine = fake_engine(
            rng.randint(9, 12),
            Limits(rng.choice([16, 32, 64]), rng.choice([3, 6, 8])),
            num_in_flight=num_in_flight,
            prefix_caching=prefix_caching,
            num_swap_blocks=rng.choice([1, 4, 16, 64]),
            decode=FakeDrafts(3, rng.choice([0, 1, 3])) if seed % 3 == 0 else None,
        )
        sent = random_requests(rng, 12)
        waiting = list(sent)
        while engine.requests or waiting:
            if waiting and rng.random() < 0.5:
                engine.add(waiting.pop())
            if engine.requests and rng.random() < 0.05:
                one = rng.choice(sorted(engine.requests))
                engine.abort(one) if rng.random() < 0.5 else engine.failing.add(one)
            engine.step()
        engine.drain()
        for request in sent:
            assert_right_output(request)
        copied += engine.num_copied
    assert min(copied["out"], copied["in"]) > 10, "next to nothing was swapped"


class Failing:
    """Raises at the n-th copy and, where `always`, at all after it."""

    def __init__(self, number: int, always: bool = False):
        self.number = number
        self.always = always
        self.count = 0

    def __call__(self, copy: KVCopy) -> None:
        self.count += 1
        if self.count == self.number or (self.always and self.count > self.number):
            raise RuntimeError("a DMA engine has stopped")


@pytest.mark.parametrize("number", range(1, 8))
def test_a_copy_that_fails_costs_nobody_an_answer(number: int) -> None:
    fault = Failing(number)
    engine, sent = engine_of(FakeExecutor(swap_fault=fault)), requests()
    answers = run(engine, sent)
    assert fault.count >= number
    assert_solo(answers, sent)
    (incident,) = answers.incidents
    assert (incident.group, incident.name) == ("executor", "chaos")
    assert "swap failed" in incident.reason
    assert "a DMA engine has stopped" in incident.reason
    assert_whole(engine)


def test_after_three_failures_nothing_is_swapped_any_more() -> None:
    fault = Failing(2, always=True)
    executor = FakeExecutor(swap_fault=fault)
    engine, sent = engine_of(executor), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert fault.count == 1 + 3
    assert answers.incidents[-1].failures == 3
    assert engine.step().stats.swap_blocks_total == 0
    more = [engine_request(f"more{i}", [i] * 40, max_tokens=40) for i in range(6)]
    assert_solo(run(engine, more), more)
    assert fault.count == 1 + 3
    assert_whole(engine, num_swap_blocks=0)


@pytest.mark.parametrize("discard", [False, True], ids=["aborted", "failed"])
def test_an_end_while_swapped_leaves_nothing(discard: bool) -> None:
    executor = FakeExecutor()
    engine, sent = engine_of(executor), requests()
    engine.add(sent)
    answers, ended = Answers(), set()
    while engine.has_work():
        answers.take(engine.step())
        live = engine._scheduler.live
        for key in list(engine._pipeline.cache.swapped)[:1] if len(ended) < 4 else ():
            assert key in live
            reason = FinishReason.ERROR if discard else FinishReason.ABORT
            engine._forget(engine._finish([key], reason)) if discard else engine.abort([key, key, "nobody"])
            ended.add(key)
            engine._pipeline.cache._cache.check()
    assert len(ended) == 4
    for request in sent:
        if request.request_id not in ended:
            assert answers.ids(request.request_id) == solo(request)
        elif request.request_id in answers.deltas:
            ids = answers.ids(request.request_id)
            assert ids == solo(request)[: len(ids)]
    assert_whole(engine)


def test_aborts_in_each_step_of_a_swap_leave_nothing() -> None:
    """All that run, wait and are swapped, at once, whatever is due to be copied."""
    for num_steps in range(1, 60, 4):
        executor = FakeExecutor()
        engine = engine_of(executor)
        engine.add(requests())
        for _ in range(num_steps):
            engine.step()
        engine.abort([f"r{i}" for i in range(12)])
        assert_whole(engine)
        late = [engine_request("late", [1, 2, 3] * 20, max_tokens=30)]
        assert_solo(run(engine, late), late)


# The guard


def guarded(cache: PagedCache) -> GuardedCache:
    return GuardedCache(cache, Faults(NAMES), num_swap_blocks=8)


def own_cache(cls: type[PagedCache] = PagedCache, **settings: Any) -> Any:
    return cls(PagedCache.Settings(**settings), CacheContext(NUM_BLOCKS, MAX_MODEL_LEN, 8))


def swapped_out(guard: GuardedCache, name: str = "a", num_tokens: int = 40, copy: bool = True) -> Request:
    request = make_request(name, list(range(num_tokens)))
    guard.lookup(request)
    assert guard.allocate(request, num_tokens)
    guard.holdings[name].num_planned = num_tokens - 1
    assert guard.swap_out(request, num_tokens - 1) == num_tokens - 1
    if copy:
        guard.take_copies()
    return request


def test_restored_blocks_have_one_writer_and_those_of_others_are_read_only() -> None:
    guard = guarded(own_cache())
    a = swapped_out(guard)
    assert guard.swapped == {"a": 39}
    assert guard.swap_in(a) == 39
    holding = guard.holdings["a"]
    assert (holding.num_found, holding.num_planned, guard.swapped) == (2, 39, {})
    assert guard.num_free_swap_blocks == 8
    with pytest.raises(TypeError, match="only be read|read only|cannot"):
        a.block_table.append(1)


def test_a_cache_of_api_1_1_computes_again() -> None:
    class Old(PagedCache):
        swap_out = None  # type: ignore[assignment]

    guard = guarded(own_cache(Old))
    assert (guard.num_swap_blocks, guard.num_free_swap_blocks, guard.take_copies()) == (0, 0, ())
    request = make_request("a", [1, 2, 3])
    assert guard.allocate(request, 3)
    assert guard.swap_out(request, 2) == 0
    assert (request.block_table, guard.num_free_blocks) == ([], NUM_BLOCKS)
    assert guard.num_swapped_tokens(request) == 0
    assert guard.swap_in(request) == 0


def test_more_than_was_planned_to_be_written_is_not_kept() -> None:
    guard = guarded(own_cache())
    request = make_request("a", list(range(40)))
    assert guard.allocate(request, 40)
    guard.holdings["a"].num_planned = 20
    with pytest.raises(StageError, match="asked to keep 39 tokens; KV is written up to 20") as caught:
        guard.swap_out(request, 39)
    assert (caught.value.group, caught.value.request_id) == ("scheduler", "a")


@pytest.mark.parametrize("answer", [-1, 40, True, None, 3.0])
def test_a_cache_that_keeps_what_cannot_be_is_refused(answer: Any) -> None:
    class Wrong(PagedCache):
        def swap_out(self, request: Request, num_tokens: int) -> Any:
            super().swap_out(request, num_tokens)
            return answer

    with pytest.raises(StageError, match="swap_out kept"):
        swapped_out(guarded(own_cache(Wrong)))


@pytest.mark.parametrize("answer", [-1, 40, True, 7, 55])
def test_a_cache_that_restores_what_cannot_be_is_refused(answer: Any) -> None:
    class Wrong(PagedCache):
        def swap_in(self, request: Request) -> Any:
            super().swap_in(request)
            return answer

    guard = guarded(own_cache(Wrong))
    a = swapped_out(guard)
    with pytest.raises(StageError, match="swap_in restored"):
        guard.swap_in(a)


def test_a_cache_that_gives_anothers_block_to_write_to_is_refused() -> None:
    class Wrong(PagedCache):
        def swap_in(self, request: Request) -> int | None:
            restored = super().swap_in(request)
            other = next(held.request for held in self._holdings.values() if held.request is not request)
            request.block_table[-1] = other.block_table[-1]
            return restored

    guard = guarded(own_cache(Wrong))
    a = swapped_out(guard)
    b = make_request("b", [7] * 5)
    assert guard.allocate(b, 5)
    with pytest.raises(StageError, match="to write to, which is held already"):
        guard.swap_in(a)


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        (None, "no KVCopy"),
        ([3], "no KVCopy"),
        ([KVCopy("out", (0,), (8,))], "8 host blocks"),
        ([KVCopy("out", (-1,), (0,))], "9 device blocks"),
        ([KVCopy("out", (0, 1), (2,))], "of one length"),
        ([KVCopy("out", (), ())], "of one length"),
        ([KVCopy("out", (0, 1), (2, 2))], "writes a block twice"),
        ([KVCopy("sideways", (0,), (1,))], "neither out nor in"),  # type: ignore[arg-type]
        ([KVCopy("in", (0,), (7,))], "never written"),
        ([KVCopy("out", (0,), (7,)), KVCopy("in", (0,), (7,))], "did not give"),
    ],
)
def test_copies_that_would_spoil_kv_are_refused(copies: Any, reason: str) -> None:
    class Wrong(PagedCache):
        def take_copies(self) -> Any:
            return copies

    guard = guarded(own_cache(Wrong))
    swapped_out(guard, copy=False)
    with pytest.raises(StageError, match=reason) as caught:
        guard.take_copies()
    assert caught.value.group == "cache"


def test_host_blocks_that_nobody_needs_are_missed_when_the_engine_is_idle() -> None:
    class Leaks(PagedCache):
        @property
        def num_free_swap_blocks(self) -> int:
            return super().num_free_swap_blocks - 1

    guard = guarded(own_cache(Leaks))
    with pytest.raises(StageError, match="1 host blocks are needed by no request"):
        guard.check()


def test_a_copy_over_a_block_that_another_holds_is_refused() -> None:
    class Steals(PagedCache):
        def take_copies(self) -> tuple[KVCopy, ...]:
            found = super().take_copies()
            held = next((held.request for held in self._holdings.values() if held.request.request_id == "b"), None)
            return (*found, KVCopy("in", (held.block_table[0],), found[-1].host_blocks[:1])) if held else found

    guard = guarded(own_cache(Steals))
    a, b = swapped_out(guard), make_request("b", [7] * 5)
    assert guard.allocate(b, 5)
    assert guard.swap_in(a) == 39
    with pytest.raises(StageError, match="did not give, or others hold"):
        guard.take_copies()


@pytest.mark.parametrize("method", ["swap_out", "swap_in", "num_swapped_tokens", "take_copies"])
def test_a_cache_that_raises_costs_nobody_an_answer(method: str) -> None:
    raised: list[str] = []

    def fail(cache: PagedCache, *arguments: Any) -> Any:
        if not raised and cache.num_free_swap_blocks < 40:
            raised.append(method)
            raise RuntimeError("its books are in disorder")
        return getattr(super(Raises, cache), method)(*arguments)

    class Raises(PagedCache):
        pass

    setattr(Raises, method, fail)
    context = CacheContext(NUM_BLOCKS, MAX_MODEL_LEN, 40)
    engine, sent = engine_of(FakeExecutor(), cache=lambda: Raises(PagedCache.Settings(), context)), requests()
    answers = run(engine, sent)
    assert raised
    failed = [request for request in sent if answers.ends(request.request_id) == [FinishReason.ERROR]]
    assert len(failed) <= 1, "at most the request that it worked for"
    assert_solo(answers, [request for request in sent if request not in failed])
    assert [incident.group for incident in answers.incidents] == ["cache"]
    assert_whole(engine)
