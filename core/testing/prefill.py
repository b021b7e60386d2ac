"""What every prefill must do, as tests::

class TestMine(PrefillContract):
    component = Mine
"""

from __future__ import annotations

import random

import pytest

from core.stages.prefill import Prefill, PrefillContext
from core.testing.contract import Contract
from core.testing.fake_loop import assert_complete, fake_engine, random_requests
from core.testing.fakes import Limits, make_request, snapshot

BUDGETS = pytest.mark.parametrize("budget", [1, 7, 64, 2048])
LENGTHS = (1, 5, 64, 500, 9000, 20_000)  # tokens of a prompt


class PrefillContract(Contract):
    def make_prefill(self, budget: int) -> Prefill:
        prefill: Prefill = self.make(PrefillContext(max_num_scheduled_tokens=budget))
        return prefill

    @BUDGETS
    def test_no_more_than_remains_and_the_budget_allows(self, budget: int) -> None:
        prefill = self.make_prefill(budget)
        for length in LENGTHS:
            request = make_request("a", [1] * length)
            for remaining in sorted({1, min(2, length), max(length // 2, 1), length}):
                for left in sorted({1, max(budget // 2, 1), budget}):
                    found = prefill.num_tokens(request, remaining, left)
                    assert type(found) is int, f"{found!r} is no number of tokens"
                    assert 0 <= found <= min(remaining, left), f"{found} of {remaining} tokens; the budget is {left}"

    @BUDGETS
    def test_every_prompt_moves_on_when_it_has_a_step_to_itself(self, budget: int) -> None:
        prefill = self.make_prefill(budget)
        for length in LENGTHS[:4]:
            request = make_request("a", [1] * length)
            for _ in range(length):
                if request.num_computed_tokens == length:
                    break
                found = prefill.num_tokens(request, length - request.num_computed_tokens, budget)
                assert found, f"a prompt of {length} tokens gets none of a whole step of {budget}"
                request.num_computed_tokens += found
            assert request.num_computed_tokens == length

    def test_the_request_is_left_as_it_is(self) -> None:
        prefill = self.make_prefill(64)
        request = make_request("a", [1] * 200, output_token_ids=[2, 3], num_preemptions=1, num_cached_tokens=16)
        before = snapshot(request)
        for remaining in (1, 50, 202):
            prefill.num_tokens(request, remaining, 64)
        assert snapshot(request) == before

    @pytest.mark.parametrize("num_in_flight", [0, 1], ids=["synchronous", "overlap"])
    @pytest.mark.parametrize("num_blocks", [9, 30, 200])
    def test_outputs_are_those_of_a_solo_run(self, num_blocks: int, num_in_flight: int) -> None:
        """In an engine that mixes prompts with decodes, preempts, resumes and finds prefixes."""
        limits, rng = Limits(), random.Random(num_blocks)
        prefill = self.make_prefill(limits.max_num_scheduled_tokens)
        engine = fake_engine(num_blocks, limits, prefill=prefill, num_in_flight=num_in_flight)
        requests = random_requests(rng, 20)
        for request in requests:
            engine.add(request)
            for _ in range(rng.randrange(3)):
                engine.step()
        engine.drain()
        assert_complete(engine, requests)

    def test_prompts_longer_than_a_step_end(self) -> None:
        limits = Limits(max_num_scheduled_tokens=20, max_num_running_reqs=4)
        engine = fake_engine(64, limits, prefill=self.make_prefill(20))
        requests = [make_request(f"r{index}", [index] * length, 6) for index, length in enumerate((70, 3, 41, 20, 19))]
        engine.add(*requests)
        engine.drain()
        assert_complete(engine, requests)
