"""`fcfs` keeps the scheduler contract and its order; the shared mechanism keeps it under random orders of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from core.request import Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.scheduling.starts import MAX_PASSED
from core.stages.prefill import Chunked, Prefill, PrefillContext, Whole
from core.stages.scheduler import SchedulerContext
from core.testing.fake_loop import fake_engine
from core.testing.fakes import FakeDrafts, FakeEngine, Limits, make_request
from core.testing.scheduler import ArrivalOrderContract, SchedulerChecks, SchedulerContract
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.fcfs import Fcfs


def pin(engine: FakeEngine, request: Request) -> Request:
    """A third party that holds the request's blocks too, as a swap in progress does."""
    pinned = make_request("pinned", [3], block_table=list(request.block_table))
    holdings = engine.cache._holdings  # type: ignore[attr-defined]
    holdings["pinned"] = type(holdings[request.request_id])(pinned)
    for block in pinned.block_table:
        engine.cache._pool.acquire(block)  # type: ignore[attr-defined]
    return pinned


class TestFcfs(SchedulerContract, ArrivalOrderContract):
    component = Fcfs
    provides = frozenset({"drafts", "jump_forward"})

    def test_a_preemption_that_gains_nothing_is_not_done(self) -> None:
        """The victim's blocks are all held by another too (bug J3)."""
        engine = self.make_engine(6, chunk_size=64)
        old, young = make_request("old", [1] * 40, 30), make_request("young", [2] * 34, 20)
        engine.add(old, young)
        engine.step()
        pinned = pin(engine, young)
        for _ in range(13):  # `old` lacks a block from its 9th token on; `young` has room for 14
            assert engine.step().scheduled, "someone makes progress in each step"
        assert len(old.output_token_ids) < len(young.output_token_ids)
        engine.step()
        assert engine.preempted == []
        engine.cache.free(pinned)
        engine.drain()
        self.assert_complete(engine, [old, young])

    def test_a_victim_that_frees_nothing_is_passed_over(self) -> None:
        engine = self.make_engine(9, chunk_size=64, limits=Limits(max_num_scheduled_tokens=200))
        old, middle, young = requests = [make_request(f"r{index}", [index] * 40, 30) for index in range(3)]
        engine.add(*requests)
        engine.step()
        pinned = pin(engine, young)
        while not engine.preempted:
            engine.step()
        assert engine.preempted == [middle.request_id]
        engine.cache.free(pinned)
        engine.drain()
        self.assert_complete(engine, requests)

    def test_no_more_preemptions_than_blocks_gained(self) -> None:
        engine = self.make_engine(20, chunk_size=64)
        requests = self.random_requests(random.Random(5), 30, max_tokens=60)
        engine.add(*requests)
        while engine.requests:
            free = engine.cache.num_free_blocks
            output = engine.step()
            taken = sum(len(part.request.block_table) for part in output.scheduled)
            assert len(output.preempted) <= taken + free
            assert not output.preempted or output.scheduled
        assert engine.preempted
        self.assert_complete(engine, requests)

    def test_resumes_only_when_all_its_tokens_fit(self) -> None:
        """A prompt of four chunks in a nearly full pool is not resumed for one chunk (bug J7)."""
        engine = self.make_engine(12, chunk_size=24)
        first, long = make_request("first", [1] * 60, 100), make_request("long", [2] * 96, 60)
        engine.add(first, long)
        while engine.requests:
            engine.step()
            if long.status is RequestStatus.RUNNING:
                assert len(long.block_table) * 16 >= long.num_tokens - 1  # the newest id has no KV yet
        assert long.num_preemptions == 1
        self.assert_complete(engine, [first, long])

    @pytest.mark.parametrize("num_blocks", [8, 9, 10])
    def test_a_resumed_request_leaves_the_others_room_to_grow(self, num_blocks: int) -> None:
        """Resumed into the very last blocks, it would be preempted again by the next decode."""
        engine = self.make_engine(num_blocks, chunk_size=64, prefix_caching=False)
        requests = [make_request("a", [1] * 16, 100), make_request("b", [2] * 10, 24), make_request("c", [3] * 60, 60)]
        engine.add(*requests)
        engine.drain()
        assert engine.preempted == ["c"]
        self.assert_complete(engine, requests)

    def test_a_resumed_request_finds_its_own_blocks(self) -> None:
        engine = self.make_engine(12, chunk_size=200)
        first, second = make_request("first", [1] * 60, 60), make_request("second", [2] * 96, 60)
        engine.add(first, second)
        resumed_at = []
        while engine.requests:
            for part in engine.step().scheduled:
                if part.request is second and second.num_preemptions and part.num_tokens > 1:
                    resumed_at.append(part.start)
        assert resumed_at and min(resumed_at) > 0
        assert second.num_cached_tokens == 0  # what it computed itself is no saving
        self.assert_complete(engine, [first, second])

    def test_decodes_are_served_before_a_long_prompt(self) -> None:
        limits = Limits(max_num_scheduled_tokens=32, max_num_running_reqs=8)
        engine = self.make_engine(100, limits, chunk_size=32)
        long = make_request("long", [1] * 300, 4)
        short = [make_request(f"s{index}", [index] * 2, 30) for index in range(5)]
        engine.add(*short)
        engine.step()
        engine.add(long)
        for _ in range(8):
            output = engine.step()
            assert {part.request.request_id for part in output.scheduled} >= {request.request_id for request in short}
        engine.drain()
        self.assert_complete(engine, [*short, long])

    def test_more_running_requests_than_tokens_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="max_num_running_reqs"):
            Fcfs.Settings(max_num_scheduled_tokens=8, max_num_running_reqs=9)


class HighestFirst(Policy):
    """A test policy: lower `priority` first, and it displaces; ties by arrival."""

    def waiting_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: request.priority)

    running_order = waiting_order

    def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        order = self.running_order(running)
        return order[: order.index(request) : -1]

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        return [request for request in reversed(self.running_order(running)) if request.priority > head.priority]


class Counting:
    """A `Prefill` that counts how often it is asked."""

    def __init__(self, prefill: Prefill):
        self._prefill, self.num_asked = prefill, 0

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        self.num_asked += 1
        return self._prefill.num_tokens(request, remaining, token_budget)


class TestDisplacingPolicy(SchedulerContract):
    """The mechanism under a policy that reorders and displaces."""

    provides = frozenset({"drafts", "jump_forward"})

    class component(QueueScheduler):
        Settings = QueueSettings

        def __init__(self, settings: QueueSettings, context: SchedulerContext):
            super().__init__(settings, context, HighestFirst())

    @pytest.mark.parametrize(
        ("num_blocks", "max_running"), [(7, 8), (60, 2), (7, 2)], ids=["blocks lack", "slots lack", "both lack"]
    )
    def test_a_displacing_head_runs_in_the_step_that_displaces(self, num_blocks: int, max_running: int) -> None:
        limits = Limits(max_num_running_reqs=max_running)
        engine = self.make_engine(num_blocks, limits)
        low = [make_request(f"low{index}", [index] * 40, 20, priority=5) for index in range(2)]
        engine.add(*low)
        for _ in range(4):
            engine.step()
        high = make_request("high", [9] * 20, 20, priority=1)
        engine.add(high)
        output = engine.step()
        assert high in [part.request for part in output.scheduled]
        assert [request.request_id for request in output.preempted] == ["low1"]
        engine.drain()
        assert engine.ended[next(iter(engine.ended))] is not low[1]
        self.assert_complete(engine, [*low, high])

    @pytest.mark.parametrize("held_back", ["by its length", "by the step's budget"])
    def test_nobody_gives_way_to_a_head_that_stage_5_holds_back(self, held_back: str) -> None:
        """It would be preempted for nothing, and again in the next step."""
        limits = Limits(max_num_running_reqs=2, max_num_scheduled_tokens=48)
        prefill: Prefill = Whole(Whole.Settings(), PrefillContext(48))
        if held_back == "by its length":
            settings = Chunked.Settings(chunk_size=4, long_chunk_size=4, long_prompt=40, max_long_prefills=1)
            prefill = Chunked(settings, PrefillContext(48))
        engine = fake_engine(60, limits, scheduler=self.make_scheduler, prefill=prefill)
        first = make_request("first", [1] * (60 if held_back == "by its length" else 20), 40, priority=5)
        short = make_request("short", [2] * 4, 40, priority=5)
        engine.add(first, short)
        engine.step()
        high = make_request("high", [3] * 47, 4, priority=1)  # 47 and a token of another running request are 48
        engine.add(high)
        num_steps = 0
        while not high.num_computed_tokens:
            engine.step()
            num_steps += 1
            assert not engine.preempted or high.num_computed_tokens, "a victim, and the head does not run"
            assert num_steps < 40
        assert engine.preempted == ["short"]
        engine.drain()
        self.assert_complete(engine, [first, short, high])

    def test_what_stage_5_holds_back_is_not_asked_for_in_each_step(self) -> None:
        """Three hundred long prompts behind the one that runs, and a short one behind them all."""
        settings = Chunked.Settings(chunk_size=4, long_chunk_size=4, long_prompt=40, max_long_prefills=1)
        prefill = Counting(Chunked(settings, PrefillContext(64)))
        engine = fake_engine(400, Limits(), scheduler=self.make_scheduler, prefill=prefill)
        engine.add(*(make_request(f"long{index:03}", [index % 50] * 41, 2) for index in range(300)))
        short = make_request("short", [7] * 3, 2)
        engine.add(short)
        asked = []
        for _ in range(60):
            before = prefill.num_asked
            engine.step()
            asked.append(prefill.num_asked - before)
        assert max(asked) <= 2 * MAX_PASSED + 2 * Limits().max_num_running_reqs
        assert short.is_finished, "those behind get their turn"

    def test_a_request_displaced_with_drafts_in_flight_keeps_the_right_ones(self) -> None:
        engine = self.make_engine(60, Limits(max_num_running_reqs=1), decode=FakeDrafts(3, 1))
        low, high = make_request("low", [1] * 20, 20, priority=5), make_request("high", [2] * 20, 5, priority=1)
        engine.add(low)
        engine.step()
        engine.num_in_flight = 1
        assert engine.step().scheduled[0].num_drafts == 3
        engine.add(high)
        num_output = low.num_output_tokens
        assert engine.step().preempted == (low,)
        assert (low.num_output_tokens, low.num_computed_tokens) == (num_output + 3, 0)
        engine.drain()
        self.assert_complete(engine, [low, high])

    def test_equals_do_not_displace_each_other(self) -> None:
        """20 of equal priority on two slots: nobody is preempted (bug J5)."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=2))
        requests = [make_request(f"r{index}", [index] * 5, 5) for index in range(20)]
        engine.add(*requests)
        engine.drain()
        assert engine.preempted == []
        self.assert_complete(engine, requests)


class TestWithoutVictims(SchedulerChecks):
    """A policy that never lets anyone give way still cannot stop the engine."""

    class Stubborn(Policy):
        head_of_line = False

        def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
            return ()

    class component(QueueScheduler):
        Settings = QueueSettings

        def __init__(self, settings: QueueSettings, context: SchedulerContext):
            super().__init__(settings, context, TestWithoutVictims.Stubborn())

    def test_when_all_lack_blocks_the_first_gets_the_pool(self) -> None:
        engine = self.make_engine(7)
        requests = [make_request(f"r{index}", [index] * 20, 40, seed=index) for index in range(4)]
        engine.add(*requests)
        while engine.requests:
            output = engine.step()
            # What a preempted request gave up is not handed to a waiting one in the same step.
            assert not output.preempted or len(output.scheduled) == 1
        assert engine.preempted
        engine.drain()
        self.assert_complete(engine, requests)


class FcfsMachine(SchedulerMachine):
    checks = TestFcfs

    def after_all(self) -> None:
        kept = {name for name in self.added if not self.held_back(self.engine.ended[name])}
        order = [name for name in self.engine.first_scheduled if name in kept]
        assert order == [name for name in self.added if name in order]


TestFcfsMachine = machine_test(FcfsMachine)
