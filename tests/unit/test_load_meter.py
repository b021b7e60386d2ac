"""What a front counts of its load: what is in it at each moment, and nothing once all is gone."""

from __future__ import annotations

import random

import pytest

from core.front.load import LoadMeter
from core.outputs import StepStats
from core.request import EngineRequest, SamplingParams
from core.stages.frontend import OUTPUT_GUESS, Load


def sequence(key: str, num_prompt: int = 10, max_tokens: int = 20, tenant: str = "") -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=key, prompt_token_ids=[1] * num_prompt, params=params, seed=0, tenant=tenant)


def step(num_tokens: int, seconds: float, waiting: int = 0, **stats: int) -> StepStats:
    values = {"num_requests": 1, "num_scheduled_tokens": num_tokens, "waiting": waiting, "running": 1, **stats}
    return StepStats(**values, forward_s=seconds)  # type: ignore[arg-type]


def test_a_sequence_is_queued_until_its_first_token() -> None:
    meter = LoadMeter()
    meter.add(sequence("a", 10, 20))
    meter.add(sequence("b", 5, 1))
    load = meter.load()
    assert (load.in_flight, load.prompt_tokens_in_flight) == (2, 15)
    assert (load.queued_prompt_tokens, load.queued_tokens) == (15, 36)
    meter.started("a")
    meter.started("a")
    assert (meter.load().queued_prompt_tokens, meter.load().queued_tokens) == (5, 6)
    meter.ended("a", 7)
    meter.ended("a", 7)
    meter.ended("b")
    meter.ended("nobody")
    assert meter.load() == Load(mean_output_tokens=7.0)


def test_expected_output_follows_what_ended_and_is_no_more_than_max_tokens() -> None:
    meter = LoadMeter()
    assert meter.load().expected_output(10_000) == OUTPUT_GUESS and meter.load().expected_output(7) == 7
    for index in range(200):
        meter.add(sequence(f"r{index}", max_tokens=10_000))
        meter.ended(f"r{index}", 40)
    meter.add(sequence("aborted"))
    meter.ended("aborted")
    assert meter.load().mean_output_tokens == pytest.approx(40.0)
    assert meter.load().expected_output(10_000) == 40 and meter.load().expected_output(7) == 7


def test_tenants_have_their_own_share_and_callers_without_a_key_none() -> None:
    meter = LoadMeter()
    meter.add(sequence("a", 10, 20, tenant="gold"))
    meter.add(sequence("b", 10, 20, tenant="iron"))
    meter.add(sequence("c", 10, 20))
    with meter.rendering("gold", 3):
        assert (meter.load().in_flight, meter.load("gold").tenant_in_flight) == (6, 4)
        assert meter.load("iron").tenant_in_flight == 1 and meter.load("other").tenant_in_flight == 0
    assert (meter.load("gold").tenant_in_flight, meter.load("gold").tenant_tokens_in_flight) == (1, 30)
    assert (meter.load("").tenant_in_flight, meter.load("").tenant_tokens_in_flight) == (0, 0)


def test_throughput_is_that_under_load() -> None:
    meter = LoadMeter()
    for _ in range(100):
        meter.step(step(1, 0.05))
    assert meter.load().tokens_per_s == 0.0, "nobody waited: it could do more"
    for _ in range(100):
        meter.step(step(64, 0.05, waiting=3))
    assert meter.load().tokens_per_s == pytest.approx(1280.0)
    for _ in range(100):
        meter.step(step(1, 0.05))
    assert meter.load().tokens_per_s == pytest.approx(1280.0), "still"
    for _ in range(2000):
        meter.step(step(200, 0.05))
    assert meter.load().tokens_per_s == pytest.approx(4000.0, rel=0.01), "it did more than it was thought to"


def test_a_slow_first_step_is_forgotten() -> None:
    meter = LoadMeter()
    meter.step(step(10, 3.0, waiting=1))
    for _ in range(1200):
        meter.step(step(50, 0.05, waiting=1))
    assert meter.load().tokens_per_s == pytest.approx(1000.0, rel=0.03)


def test_what_the_cache_had_counts_as_done_and_swapped_ones_wait() -> None:
    meter = LoadMeter()
    for _ in range(100):
        meter.step(step(10, 0.05, waiting=0, swapped=2, num_cached_tokens=90))
    assert meter.load().tokens_per_s == pytest.approx(2000.0) and meter.load().waiting == 2


@pytest.mark.parametrize("tokens_per_s", [0.0, 100.0])
def test_queueing_time(tokens_per_s: float) -> None:
    load = Load(queued_prompt_tokens=200, queued_tokens=500, tokens_per_s=tokens_per_s)
    busy = Load(queued_prompt_tokens=200, queued_tokens=500, tokens_per_s=tokens_per_s, waiting=1)
    assert (load.queueing_s, busy.queueing_s) == ((2.0, 5.0) if tokens_per_s else (0.0, 0.0))


def test_counts_are_those_of_a_recount_and_all_goes_back() -> None:
    rng, meter = random.Random(1), LoadMeter()
    open_ones: dict[str, tuple[EngineRequest, bool]] = {}
    for index in range(2000):
        if rng.random() < 0.5 or not open_ones:
            new = sequence(f"r{index}", rng.randint(1, 50), rng.randint(1, 50), rng.choice(["", "a", "b"]))
            open_ones[new.request_id] = new, True
            meter.add(new)
        else:
            key = rng.choice(list(open_ones))
            if open_ones[key][1] and rng.random() < 0.5:
                open_ones[key] = open_ones[key][0], False
                meter.started(key)
            else:
                del open_ones[key]
                meter.ended(key)
        prompts = [len(one.prompt_token_ids) for one, queued in open_ones.values() if queued]
        outputs = [one.params.max_tokens for one, queued in open_ones.values() if queued]
        load = meter.load("a")
        assert load.in_flight == len(open_ones)
        assert (load.queued_prompt_tokens, load.queued_tokens) == (sum(prompts), sum(prompts) + sum(outputs))
        assert load.tenant_in_flight == sum(one.tenant == "a" for one, _ in open_ones.values())
    for key in open_ones:
        meter.ended(key)
    assert meter.load("a") == Load(tenant="a")
    assert not meter._sequences and not meter._of_tenant and not meter._tokens_of_tenant


def test_plus_is_what_adding_would_make() -> None:
    for tenant in ("gold", ""):
        meter = LoadMeter()
        expected = meter.load(tenant).plus(2, 30, 500).plus(1, 30, 5)
        for key, most in (("a", 500), ("b", 500), ("c", 5)):
            meter.add(sequence(key, 30, most, tenant))
        assert meter.load(tenant) == expected
