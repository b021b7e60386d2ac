"""What every scheduler must do, as tests::

    class TestMine(SchedulerContract):
        component = Mine

`FakeEngine` checks budgets, blocks, token counts, progress and single endings after every step of every test here, and
the fake model makes each output depend on each block and position that was read.
"""

from __future__ import annotations

import random

import pytest

from core.batch import Verdict
from core.request import FinishReason, SamplingParams
from core.stages.scheduler import Counts
from core.testing.arrival_order import ArrivalOrderContract
from core.testing.clocks import trap_clocks
from core.testing.fake_loop import BLOCK_SIZE
from core.testing.fakes import FakeDrafts, Limits, assert_right_output, expected_ids, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks

__all__ = ["ArrivalOrderContract", "SchedulerChecks", "SchedulerContract"]


class SchedulerContract(SchedulerChecks):
    @OVERLAP
    @pytest.mark.parametrize("num_blocks", [9, 13, 30, 200])
    @pytest.mark.parametrize("options", [{}, {"whole": True}, {"prefix_caching": False}], ids=str)
    def test_outputs_are_those_of_a_solo_run(
        self, num_blocks: int, num_in_flight: int, options: dict[str, bool]
    ) -> None:
        rng = random.Random(num_blocks)
        engine = self.make_engine(num_blocks, num_in_flight=num_in_flight, **options)  # type: ignore[arg-type]
        requests = self.random_requests(rng, 20)
        for request in requests:
            engine.add(request)
            for _ in range(rng.randrange(3)):
                engine.step()
        engine.drain()
        self.assert_complete(engine, requests)

    @OVERLAP
    def test_preempted_requests_lose_nothing(self, num_in_flight: int) -> None:
        """KV for 2.5 sequences, 8 requests of 200 tokens (bug J1)."""
        engine = self.make_engine(34, num_in_flight=num_in_flight)
        requests = [make_request(f"r{index}", [index] * 10, 200, seed=index) for index in range(8)]
        engine.add(*requests)
        num_running: list[int] = []
        engine.drain(lambda _: num_running.append(engine.scheduler.counts().running))
        # Two fit to their ends; a scheduler that starts no more need not preempt.
        assert engine.preempted or max(num_running) <= 2, "the pool was meant to be too small"
        self.assert_complete(engine, requests)

    @pytest.mark.parametrize("num_wrong", [0, 1, 3])
    @pytest.mark.parametrize("num_blocks", [9, 60])
    def test_rejected_drafts_are_rolled_back(self, num_wrong: int, num_blocks: int) -> None:
        self.needs("drafts")
        engine = self.make_engine(num_blocks, decode=FakeDrafts(3, num_wrong))
        requests = self.random_requests(random.Random(num_wrong), 12)
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)

    @pytest.mark.parametrize("num_blocks", [9, 60])
    def test_drafts_in_flight_wait_for_their_verdict(self, num_blocks: int) -> None:
        self.needs("drafts")
        rng = random.Random(3)
        engine = self.make_engine(num_blocks, decode=FakeDrafts(3, 1))
        requests = self.random_requests(rng, 16)
        engine.add(*requests)
        drafts_in_flight = 0
        while engine.requests:
            output = engine.step()
            drafts_in_flight += engine.num_in_flight and any(part.num_drafts for part in output.scheduled)
            engine.num_in_flight = rng.choice([0, 1])  # settled now and then, or there is nothing to draft from
        assert drafts_in_flight
        engine.drain()
        self.assert_complete(engine, requests)

    @pytest.mark.parametrize("num_blocks", [9, 13, 60])
    @pytest.mark.parametrize("decode", [None, FakeDrafts(3, 1)], ids=["plain", "drafts"])
    def test_ids_that_a_grammar_forces_are_computed_in_the_next_step(
        self, num_blocks: int, decode: FakeDrafts | None
    ) -> None:
        """A verdict keeps more ids than were sampled: the others are known, and not yet computed."""
        self.needs("jump_forward")
        if decode is not None:
            self.needs("drafts")
        limits = Limits(max_num_scheduled_tokens=12) if num_blocks == 13 else None  # a step has room for few of them
        engine = self.make_engine(num_blocks, limits, decode=decode)
        engine.forces = random.Random(num_blocks)
        requests = self.random_requests(random.Random(5), 20)
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)
        num_tokens = sum(request.num_output_tokens for request in requests)
        assert num_blocks < 60 or engine.num_steps < num_tokens / 2, "forced ids took steps of their own"

    @OVERLAP
    @pytest.mark.parametrize("seed", range(4))
    def test_abort_at_any_time(self, seed: int, num_in_flight: int) -> None:
        rng = random.Random(seed)
        engine = self.make_engine(rng.choice([9, 14, 60]), num_in_flight=num_in_flight)
        requests = self.random_requests(rng, 30)
        for request in requests:
            engine.add(request)
            if engine.requests and rng.random() < 0.5:
                engine.abort(rng.choice(sorted(engine.requests)))
            engine.step()
        engine.abort(*sorted(engine.requests)[::2])
        engine.drain()
        for request in requests:
            assert_right_output(request)

    def test_late_unknown_and_repeated_aborts_are_ignored(self) -> None:
        """A completion and an abort cross each other (bug I4)."""
        engine = self.make_engine()
        first, second = make_request("a", [1, 2, 3], 4), make_request("b", [4, 5, 6], 4)
        engine.add(first, second)
        engine.step()
        engine.abort("a", "a", "nobody")
        engine.abort("a")
        engine.drain()
        engine.abort("b", "a")
        assert (first.finish_reason, second.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)

    def test_an_id_can_be_used_again_while_the_aborted_step_is_in_flight(self) -> None:
        engine = self.make_engine(num_in_flight=1)
        engine.add(make_request("a", [1, 2, 3], 6))
        for _ in range(3):
            engine.step()
        engine.abort("a")
        del engine.ended["a"]
        again = make_request("a", [9, 8, 7], 6, seed=3)
        engine.add(again)
        engine.drain()
        self.assert_complete(engine, [again])

    def test_aborted_requests_leave_their_prefix(self) -> None:
        """What an interrupted request has written is found by the next one (bug I5)."""
        engine = self.make_engine(100, Limits(max_num_scheduled_tokens=512), chunk_size=512)
        prompt = [index % 50 for index in range(400)]
        engine.add(make_request("a", prompt, 50))
        for _ in range(20):
            engine.step()
        engine.abort("a")
        again = make_request("b", prompt, 4)
        engine.add(again)
        engine.step()
        assert again.num_cached_tokens == 400 - BLOCK_SIZE
        engine.drain()
        self.assert_complete(engine, [again])

    def test_a_chunk_in_flight_is_not_shared_yet(self) -> None:
        """Its step may still fail; only what `update` has seen is findable."""
        engine = self.make_engine(num_in_flight=1, chunk_size=16)
        engine.add(make_request("a", [1] * 64, 4))
        engine.step()
        engine.step()
        probe = make_request("probe", [1] * 64)
        assert engine.cache.lookup(probe) == 16
        engine.cache.free(probe)
        engine.drain()

    def test_no_block_is_lost_over_many_requests(self) -> None:
        """2,000 requests at concurrency 8, then idle (bug I2); `drain` compares the free blocks with the pool."""
        engine = self.make_engine(40)
        rng = random.Random(1)
        for index in range(2000):
            engine.add(make_request(f"r{index}", [rng.randrange(50) for _ in range(rng.randint(1, 40))], 2))
            if len(engine.requests) >= 8:
                engine.step()
        engine.drain()
        assert len(engine.ended) == 2000

    @OVERLAP
    def test_a_request_larger_than_the_pool_is_refused(self, num_in_flight: int) -> None:
        """8 blocks of 16: one request of 200 tokens, then two of 100 that must take turns (bug J4)."""
        engine = self.make_engine(8, num_in_flight=num_in_flight)
        large = make_request("large", [1] * 200, 4)
        engine.add(large)
        engine.drain()
        assert (large.finish_reason, large.output_token_ids) == (FinishReason.ERROR, [])
        pair = [make_request(name, [seed] * 50, 50, seed=seed) for seed, name in enumerate("ab")]
        engine.add(*pair)
        engine.drain()
        self.assert_complete(engine, pair)

    @OVERLAP
    def test_a_request_that_outgrows_the_pool_ends_alone(self, num_in_flight: int) -> None:
        engine = self.make_engine(4, num_in_flight=num_in_flight)
        grows, small = make_request("grows", [1] * 40, 100), make_request("small", [2] * 8, 8)
        engine.add(grows, small)
        engine.drain()
        assert grows.finish_reason is FinishReason.ERROR
        assert len(grows.output_token_ids) == 4 * BLOCK_SIZE - 40 + 1
        assert_right_output(grows)
        self.assert_complete(engine, [small])

    def test_a_request_of_exactly_the_pool_runs(self) -> None:
        engine = self.make_engine(4)
        requests = [make_request(f"r{index}", [index] * 60, 5) for index in range(3)]  # the last id needs no KV
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)

    def test_a_prompt_that_cannot_be_run_is_refused(self) -> None:
        engine = self.make_engine(limits=Limits(max_model_len=32))
        empty, long, fits = make_request("empty", []), make_request("long", [1] * 33), make_request("fits", [1] * 4)
        engine.add(empty, long, fits)
        engine.drain()
        assert (empty.finish_reason, long.finish_reason) == (FinishReason.ERROR, FinishReason.ERROR)
        self.assert_complete(engine, [fits])

    @pytest.mark.parametrize("whole", [False, True])
    def test_prompts_longer_than_a_step_end(self, whole: bool) -> None:
        limits = Limits(max_num_scheduled_tokens=20, max_num_running_reqs=4)
        engine = self.make_engine(limits=limits, whole=whole)
        requests = [make_request(f"r{index}", [index] * length, 6) for index, length in enumerate((70, 3, 41, 20, 19))]
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)

    def test_equal_prompts_share_and_still_compute_a_token(self) -> None:
        """A prompt cached whole, its length a multiple of the block size (F54)."""
        engine = self.make_engine()
        for index in range(3):
            request = make_request(f"r{index}", [5] * 48, 3)
            engine.add(request)
            first = engine.step().scheduled[0]
            assert first.start + first.num_tokens <= 48 and first.num_tokens >= 1
            engine.drain()
            assert request.num_cached_tokens == (32 if index else 0)
            self.assert_complete(engine, [request])

    def test_prompt_logprobs_get_every_position_computed(self) -> None:
        engine = self.make_engine()
        params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
        plain, scored = make_request("plain", [5] * 48, 3), make_request("scored", [5] * 48, params=params)
        engine.add(plain)
        engine.drain()
        engine.add(scored)
        computed: list[int] = []
        while scored.request_id in engine.requests:
            for part in engine.step().scheduled:
                computed += range(part.start, part.start + part.num_tokens)
        assert computed == list(range(50))
        self.assert_complete(engine, [scored])

    def test_only_the_last_chunk_of_a_prompt_samples(self) -> None:
        engine = self.make_engine(chunk_size=10)
        engine.add(make_request("a", [1] * 25, 2))
        parts = [engine.step().scheduled[0] for _ in range(4)]
        assert [part.num_tokens for part in parts] == [10, 10, 5, 1]
        assert [part.samples for part in parts] == [False, False, True, True]

    def test_a_request_without_a_verdict_ends_instead_of_hanging(self) -> None:
        engine = self.make_engine()
        request = make_request("a", [1, 2, 3], 5)
        engine.scheduler.add(request)
        output = engine.scheduler.schedule()
        assert engine.scheduler.update(output, {}) == [request]
        assert request.finish_reason is FinishReason.ERROR
        assert engine.scheduler.counts() == Counts()

    def test_an_error_in_a_prompt_chunk_ends_that_request_only(self) -> None:
        engine = self.make_engine(chunk_size=10)
        bad, good = make_request("bad", [1] * 25, 2), make_request("good", [2] * 5, 4)
        engine.scheduler.add(bad)
        output = engine.scheduler.schedule()
        assert engine.scheduler.update(output, {"bad": Verdict((), FinishReason.ERROR)}) == [bad]
        assert engine.cache.num_free_blocks == engine.cache.num_blocks
        engine.add(good)
        engine.drain()
        self.assert_complete(engine, [good])

    def test_what_a_failed_request_wrote_is_not_shared(self) -> None:
        """It may be NaN: the blocks of a request that ends with an error are freed with `discard`."""
        engine = self.make_engine(chunk_size=16)
        engine.scheduler.add(make_request("bad", [1] * 64, 4))
        engine.scheduler.update(engine.scheduler.schedule(), {})
        output = engine.scheduler.schedule()
        engine.scheduler.update(output, {"bad": Verdict((), FinishReason.ERROR)})
        assert engine.cache.lookup(make_request("probe", [1] * 64)) == 0

    @pytest.mark.parametrize("num_blocks", [9, 60])
    def test_a_request_that_comes_with_output_goes_on(self, num_blocks: int) -> None:
        """After a failure of a scheduler its requests are added to a new one: like preempted ones, but new to it."""
        engine = self.make_engine(num_blocks)
        requests = self.random_requests(random.Random(8), 12)
        for index, request in enumerate(requests):
            request.append_output(expected_ids(request)[: index % request.params.max_tokens])
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)

    def test_ids_in_flight_stop_at_max_tokens(self) -> None:
        """With a step in flight nothing is planned beyond the last token that a request may have."""
        engine = self.make_engine(num_in_flight=1)
        engine.add(make_request("a", [1, 2, 3], 4))
        counts = [len(engine.step().scheduled) for _ in range(5)]
        assert counts == [1, 1, 1, 1, 0]
        assert engine.ended["a"].output_token_ids == expected_ids(engine.ended["a"])

    def test_nobody_starves_while_equals_come_and_go(self) -> None:
        """One request among a steady stream of others just like it gets its turn."""
        engine = self.make_engine(60, Limits(max_num_running_reqs=2))
        first = [make_request(f"first{index}", [index] * 8, 4) for index in range(8)]
        engine.add(*first)
        for index in range(400):
            engine.add(make_request(f"later{index}", [index % 50] * 8, 4))
            while len(engine.requests) >= 9:
                engine.step()
        starved = [request.request_id for request in first if not request.is_finished]
        assert not starved, f"{starved} waited while {len(engine.ended)} others came and went"
        engine.drain()

    def test_no_clock_is_read_but_the_injected_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.make_engine(9)
        called = trap_clocks(monkeypatch, type(engine.scheduler))
        requests = self.random_requests(random.Random(4), 8)
        engine.add(*requests)
        engine.step()
        engine.abort(requests[0].request_id)
        engine.drain()
        monkeypatch.undo()
        assert not called, f"the scheduler reads {called[0]}; SchedulerContext.clock is the only clock it may read"

    def test_a_message_that_comes_twice_counts_once(self) -> None:
        engine = self.make_engine()
        request = make_request("a", [1, 2, 3], 4)
        engine.add(request)
        engine.scheduler.add(make_request("a", [1, 2, 3], 4))
        engine.drain()
        self.assert_complete(engine, [request])
