"""What every prefill must do, as tests::

class TestMine(PrefillContract):
    component = Mine
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from core.request import RequestStatus
from core.stages.prefill import Prefill, PrefillContext
from core.stages.step_cost import StepTime
from core.testing.contract import Contract
from core.testing.fake_loop import assert_complete, fake_engine, random_requests
from core.testing.fakes import Limits, make_request, snapshot

BUDGETS = pytest.mark.parametrize("budget", [1, 7, 64, 2048])
LENGTHS = (1, 5, 64, 500, 9000, 20_000)  # tokens of a prompt


def odd_steps(rng: random.Random) -> Iterator[StepTime]:
    """Plausible ones first, then what a clock that was set back, a suspended machine or an idle device would give."""
    for _ in range(20):
        num_tokens, num_decodes = rng.randrange(256), rng.randrange(1, 16)
        yield StepTime(num_tokens, num_decodes, 0.01 + num_tokens * 1e-4 + num_decodes * 1e-3, num_tokens * 100)
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e-300, 1e300, 3600.0):
        yield StepTime(64, 4, seconds, 2080)
        yield StepTime(0, 4, seconds)


def sizes(component: object, depth: int = 3) -> int:
    """Items of all lists, sets and mappings in its attributes, and in those of the objects that these hold."""
    if isinstance(component, list | tuple | set | dict):
        items = list(component.values()) if isinstance(component, dict) else list(component)
        return len(items) + sum(sizes(item, depth - 1) for item in items if depth)
    return (
        sum(sizes(value, depth - 1) for value in vars(component).values())
        if depth and hasattr(component, "__dict__")
        else 0
    )


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

    def test_what_steps_take_changes_no_promise(self) -> None:
        """A prefill that is told of steps, of odd ones too, keeps within its bounds, and a prompt that is alone moves on."""
        prefill = self.make_prefill(256)
        tell = getattr(prefill, "step_finished", None)
        if tell is None:
            pytest.skip("it has no step_finished")
        for step in odd_steps(random.Random(5)):
            tell(step)
            request = make_request("a", [1] * 300)
            while request.num_computed_tokens < 300:
                remaining = 300 - request.num_computed_tokens
                found = prefill.num_tokens(request, remaining, 256)
                assert type(found) is int and 0 < found <= min(remaining, 256), f"{found!r} of {remaining} after {step}"
                request.num_computed_tokens += found
                tell(step)

    def test_nothing_is_kept_of_requests_that_are_gone(self) -> None:
        """However they end: through, aborted while they wait, or preempted and then aborted."""
        prefill = self.make_prefill(64)
        tell = getattr(prefill, "step_finished", lambda step: None)
        before = sizes(prefill)
        for index in range(300):
            request = make_request(f"r{index}", [1] * LENGTHS[index % 4])
            prefill.num_tokens(request, request.num_prompt_tokens, 64)
            tell(StepTime(64, index % 3, 0.01))
            request.status = RequestStatus.FINISHED_ABORTED
        assert sizes(prefill) <= before + 64, "it keeps something of each request"

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
