"""The simulator's loop: what must hold of any run, and runs against slow twins of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from core.batch import SchedulerOutput
from core.errors import ConfigError, PluginError
from core.pipeline import PipelineDescription
from core.plugins import load_plugins
from core.session import open_session
from core.simulation.build import Simulation, SimulationSettings, build_simulation, open_simulation
from core.simulation.cost import load_cost
from core.simulation.front import SimulatedFront
from core.simulation.loop import SimulationError, simulate
from core.simulation.outcomes import MAX_REASONS, OTHER_REASONS, Reasons
from core.simulation.records import Arrival, Finish, Outcomes, RunResult
from core.simulation.step import Step
from core.stages.admission import AdmissionContext, Open
from core.stages.predictor import MaxTokens
from core.stages.step_cost import StepTime
from core.testing.engines import fake_spec
from core.testing.fake_loop import BLOCK_SIZE, fake_engine
from core.testing.fakes import Limits, make_request
from core.testing.harness.traffic import Listed

SMALL = ("scheduler.max_num_running_reqs=8", "scheduler.max_num_scheduled_tokens=64", "cache.num_blocks=40")
OPEN = "admission=open"


def some_traffic(count: int = 60, seed: int = 0, rate: float = 6.0, most: int = 120) -> Listed:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        output = rng.randint(1, most)
        tenant, priority = rng.choice("ab"), rng.randrange(3)
        arrivals.append(Arrival(now, rng.randint(1, 2 * most), output, output + index % 7, tenant, priority))
    return Listed(arrivals)


def opened(*words: str, stride: int = 1, shared: bool = False, cost: str = "gpu") -> Simulation:
    return open_simulation([OPEN, *words], SimulationSettings(cost=cost, stride=stride), shared)


def run(traffic: Listed, *words: str, stride: int = 1) -> RunResult:
    return simulate(opened(*words, stride=stride, shared=traffic.shares_content), traffic)


def assert_same(one: Outcomes, other: Outcomes) -> None:
    for field in fields(Outcomes):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def assert_all_served(traffic: Listed, result: RunResult) -> None:
    """Nobody is lost or gets more or less than its length, and each moment comes after the one before."""
    found = result.outcomes
    assert found.finish.tolist() == [Finish.SERVED] * len(traffic.arrivals)
    assert found.num_output_tokens.tolist() == [arrival.num_output_tokens for arrival in traffic.arrivals]
    assert found.num_prompt_tokens.tolist() == [arrival.num_prompt_tokens for arrival in traffic.arrivals]
    assert (found.arrival_s <= found.scheduled_s).all()
    assert (found.scheduled_s < found.first_token_s).all()
    assert (found.first_token_s <= found.end_s).all()
    assert result.steps.busy_s <= result.simulated_s == found.end_s.max()


def test_the_same_run_twice() -> None:
    one, other = (run(some_traffic(), *SMALL) for _ in range(2))
    assert_same(one.outcomes, other.outcomes)
    assert one.steps == other.steps


@pytest.mark.parametrize("scheduler", sorted(load_plugins(["all"]).names("scheduler")))
@pytest.mark.parametrize("swap", [0, 20])
def test_every_policy_serves_all_from_a_pool_that_is_too_small(scheduler: str, swap: int) -> None:
    traffic = some_traffic()
    result = run(traffic, *SMALL, f"scheduler={scheduler}", f"cache.num_swap_blocks={swap}")
    assert_all_served(traffic, result)
    # A prompt's last part brings a token, and so does the last part of one that is computed again.
    with_prompts = result.outcomes.num_output_tokens.sum() - result.steps.num_decode_tokens
    assert 0 <= with_prompts - len(traffic.arrivals) <= result.steps.num_preemptions
    assert result.steps.num_preemptions == result.outcomes.num_preemptions.sum()
    assert result.steps.num_prefill_tokens >= result.outcomes.num_prompt_tokens.sum()
    assert 0 <= result.kv_waste < 1
    assert (result.timeline.kv_used <= 1).all() and (np.diff(result.timeline.time_s) > 0).all()


def test_fcfs_does_what_it_does_over_a_model() -> None:
    """All come at once to the engine of the scheduler's own tests, whose model writes and reads KV."""
    rng, limits = random.Random(3), Limits(max_num_scheduled_tokens=64, max_num_running_reqs=8, max_model_len=1024)
    sizes = [(rng.randint(1, 90), rng.randint(1, 60)) for _ in range(24)]
    requests = [make_request(f"{i}", [i] * prompt, output) for i, (prompt, output) in enumerate(sizes)]
    engine = fake_engine(40, limits, prefix_caching=False)
    engine.add(*requests)
    ends: list[str] = []
    while engine.requests:
        engine.step()
        ends += [key for key in engine.ended if key not in ends]
    result = run(
        Listed([Arrival(0.0, prompt, output) for prompt, output in sizes]),
        *SMALL,
        f"cache.block_size={BLOCK_SIZE}",
        "prefill.chunk_size=24",
    )
    found = result.outcomes
    assert result.steps.num_plans == engine.num_steps
    assert found.num_preemptions.tolist() == [request.num_preemptions for request in requests]
    assert sum(found.num_preemptions) > 0
    assert [str(row) for row in np.argsort(found.scheduled_s, kind="stable")] == engine.first_scheduled
    assert found.end_s[[int(key) for key in ends]].tolist() == sorted(found.end_s.tolist())


@pytest.mark.parametrize("rate", [2.0, 6.0, 9.0])
def test_a_stride_comes_out_as_single_steps_do(rate: float) -> None:
    traffic = some_traffic(300, rate=rate, most=400)
    exact, strided = (run(traffic, "scheduler.max_num_running_reqs=16", stride=stride) for stride in (1, 64))
    assert_all_served(traffic, strided)
    assert strided.steps.num_plans < exact.steps.num_plans / 2
    assert strided.steps.num_prefill_tokens == exact.steps.num_prefill_tokens
    assert strided.steps.num_decode_tokens == exact.steps.num_decode_tokens
    for name, near in (("ttft_s", 0.02), ("tpot_s", 0.01), ("e2e_s", 0.01)):
        means = [np.nanmean(getattr(result.outcomes, name)) for result in (exact, strided)]
        assert means[1] == pytest.approx(means[0], rel=near), name
    assert strided.steps.running_s == pytest.approx(exact.steps.running_s, rel=0.01)
    assert strided.kv_waste == pytest.approx(exact.kv_waste, abs=0.01)


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("swap", [0, 20])
def test_parts_taken_in_bulk_come_out_as_those_taken_one_by_one(
    stride: int, swap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the digit, through preemptions, swaps and strides. The slow twin takes each part by `Resident.take`."""
    traffic, words = some_traffic(200, most=200), (*SMALL, f"cache.num_swap_blocks={swap}")
    fast = run(traffic, *words, stride=stride)
    monkeypatch.setattr(Step, "take_plain", lambda _, parts: parts)
    monkeypatch.setattr(Step, "take_strided", lambda _, parts: parts)
    slow = run(traffic, *words, stride=stride)
    assert_same(fast.outcomes, slow.outcomes)
    assert fast.steps == slow.steps and fast.steps.num_preemptions
    assert (fast.timeline.time_s == slow.timeline.time_s).all()


@pytest.mark.parametrize("stride", [1, 16])
def test_an_admission_that_never_looks_at_the_load_need_not_be_told_of_it(stride: int) -> None:
    class Watching(Open):
        """Of another type than `Open`, so the load is measured."""

    traffic, made = some_traffic(200), opened(*SMALL, stride=stride)
    context = AdmissionContext(fake_spec(max_model_len=made.max_model_len), made.clock, lambda: 0)
    watched = replace(made, admission=Watching(Open.Settings(), context))
    assert SimulatedFront(watched).measures and not SimulatedFront(opened()).measures
    one, other = simulate(watched, traffic), run(traffic, *SMALL, stride=stride)
    assert_same(one.outcomes, other.outcomes)
    assert one.steps == other.steps


def test_alone_a_request_takes_its_solo_time() -> None:
    traffic = Listed([Arrival(1000.0 * i, prompt, output) for i, (prompt, output) in enumerate([(1, 1), (700, 40)])])
    found = run(traffic).outcomes
    assert found.solo_s is not None
    assert found.e2e_s == pytest.approx(found.solo_s)


def test_unused_slots_are_those_of_the_last_block() -> None:
    """A prompt of 16 tokens fills a block of 16; the second output token takes a slot of a second block."""
    simulation = opened("cache.block_size=16")
    result = simulate(simulation, Listed([Arrival(0.0, 16, 2)]))
    seconds = simulation.cost.seconds
    first = seconds.step + 16 * seconds.prefill_token + seconds.prefill_chunk + seconds.prefill_pair * 136
    second = seconds.step + seconds.decode + seconds.decode_context * 17
    assert result.outcomes.end_s[0] == pytest.approx(first + second)
    assert result.kv_waste == pytest.approx(15 * second / (16 * first + 32 * second))


def test_prompts_of_equal_content_are_found_again_by_the_same_tenant() -> None:
    arrivals = [
        Arrival(0.0, 1100, 4, tenant="a", block_hashes=(7, 8, 9)),
        Arrival(10.0, 1030, 4, tenant="a", block_hashes=(7, 8, 10)),  # as far as its second block goes
        Arrival(20.0, 1030, 4, tenant="b", block_hashes=(7, 8, 10)),
        Arrival(30.0, 1100, 4, tenant="a", block_hashes=(7,)),  # what the hashes do not cover is its own
    ]
    result = run(Listed(arrivals, shares_content=True))
    assert result.outcomes.num_cached_tokens.tolist() == [0, 1024, 0, 512]
    assert result.steps.num_prefill_tokens == sum(a.num_prompt_tokens for a in arrivals) - 1024 - 512


def test_refused_and_expired_requests_are_told_so() -> None:
    arrivals = [Arrival(0.0, 400, 300), Arrival(0.001, 10, 5, ttl_s=0.5), Arrival(0.002, 10, 5), Arrival(60.0, 10, 5)]
    words = ("scheduler.max_num_running_reqs=1", "admission=load_aware", "admission.max_in_flight=2")
    found = run(Listed(arrivals), *words).outcomes
    assert found.finish.tolist() == [Finish.SERVED, Finish.EXPIRED, Finish.REFUSED, Finish.SERVED]
    assert 0.5 < found.end_s[1] < 0.6
    assert found.end_s[2] == 0.002
    assert np.isnan(found.scheduled_s[1:3]).all() and (found.num_output_tokens[1:3] == 0).all()


def test_what_never_fits_is_an_error_and_no_end_of_the_run() -> None:
    found = run(Listed([Arrival(0.0, 5000, 5), Arrival(0.1, 10, 5)]), *SMALL).outcomes
    assert found.finish.tolist() == [Finish.ERROR, Finish.SERVED]


def test_a_prompt_that_nobody_can_hold_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, made = opened(*SMALL), list[int]()
    prompt = Simulation.prompt
    monkeypatch.setattr(Simulation, "prompt", lambda self, length: made.append(length) or prompt(self, length))
    result = simulate(simulation, Listed([Arrival(0.0, 10_000_000, 5), Arrival(0.1, 10, 5)]))
    assert result.outcomes.finish.tolist() == [Finish.ERROR, Finish.SERVED]
    assert set(made) == {10}
    assert result.outcomes.solo_s is not None
    assert np.isnan(result.outcomes.solo_s).tolist() == [True, False]


def test_an_admission_that_lets_anything_in_gets_a_real_prompt_made() -> None:
    class Careless(Open):
        def admit(self, request, prompt_token_ids, params, load):  # type: ignore[no-untyped-def]
            (message,) = super().admit(request, [0], params, load)
            return (msgspec.structs.replace(message, prompt_token_ids=prompt_token_ids),)

    made = opened(*SMALL)
    context = AdmissionContext(fake_spec(max_model_len=made.max_model_len), made.clock, lambda: 0)
    careless = replace(made, admission=Careless(Open.Settings(), context))
    result = simulate(careless, Listed([Arrival(0.0, 5000, 5), Arrival(0.1, 10, 5)]))
    assert result.outcomes.finish.tolist() == [Finish.ERROR, Finish.SERVED]
    (reason,) = result.reasons["error"]
    assert reason.startswith("N tokens do not fit N KV blocks of N")


def test_a_component_that_raises_is_named_with_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: a predictor is one that the engine would go on without."""

    def remaining(self: MaxTokens, request: object) -> float:
        raise KeyError("no such request")

    monkeypatch.setattr(MaxTokens, "remaining", remaining)
    with pytest.raises(
        PluginError, match=r"predictor=max_tokens .* ended the simulation: KeyError: .*remaining"
    ) as caught:
        run(some_traffic(20), *SMALL, "scheduler=srtf", "predictor=max_tokens")
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_no_component_passes_as_it_is() -> None:
    class Broken(Listed):
        def __iter__(self) -> Iterator[Arrival]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Broken([]))


def test_a_scheduler_that_counts_steps_is_given_each_of_them() -> None:
    names = load_plugins(["all"]).names("scheduler")
    counts = {name for name in names if opened(f"scheduler={name}").scheduler.counts_steps}  # type: ignore[attr-defined]
    assert counts == {"time_slice"}
    with pytest.raises(ConfigError, match="stride=8 .* scheduler=time_slice counts steps: leave stride=1") as caught:
        opened("scheduler=time_slice", stride=8)
    assert caught.value.key == "stride"


def test_reasons_differ_in_words_and_not_in_numbers() -> None:
    reasons = Reasons()
    for number in (3, 4.5):
        reasons.add(
            Finish.REFUSED, f"the server is at its limit ({number} > admission.max_in_flight=2); try again later"
        )
    for index in range(2 * MAX_REASONS):
        reasons.add(Finish.ERROR, "x" * (index + 1))
    found = reasons.counts()
    assert found["refused"] == {"the server is at its limit (N > admission.max_in_flight=N)": 2}
    assert len(found["error"]) == MAX_REASONS + 1 and found["error"][OTHER_REASONS] == MAX_REASONS


def test_an_oracle_knows_the_truth_and_not_only_the_bound() -> None:
    """While one request runs, of two that wait the shorter one goes first, though it came later and asks for as much."""
    arrivals = [Arrival(0.0, 10, 50, 500), Arrival(0.01, 10, 400, 500), Arrival(0.02, 10, 5, 500)]
    words = ("scheduler=srtf", "predictor=oracle", "scheduler.max_num_running_reqs=1")
    found = run(Listed(arrivals), *words).outcomes
    assert found.end_s[2] < found.first_token_s[1]


def test_traffic_that_goes_back_in_time_is_named() -> None:
    with pytest.raises(SimulationError, match="back in time"):
        run(Listed([Arrival(1.0, 5, 5), Arrival(0.5, 5, 5)]))


def test_a_scheduler_that_plans_nothing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = opened()
    monkeypatch.setattr(simulation.scheduler, "schedule", lambda: SchedulerOutput(1))
    with pytest.raises(SimulationError, match="planned nothing in 1000 steps"):
        simulate(simulation, Listed([Arrival(0.0, 5, 5)]))


def test_no_traffic_is_no_work() -> None:
    result = run(Listed([]))
    assert len(result.outcomes) == 0 and result.simulated_s == 0.0 and result.kv_waste == 0.0


def test_cache_sizes_are_those_of_the_machine_that_is_simulated() -> None:
    assert opened().cache.num_blocks == 400_000 // 16
    assert opened("cache.memory=1GiB").cache.num_blocks == (1 << 30) // 131_072 // 16
    with pytest.raises(ConfigError, match="does not hold one KV block"):
        opened("cache.memory=1KiB")


def test_drafts_whose_fate_only_a_model_knows_are_refused() -> None:
    description = open_session([OPEN]).description
    part = description.part("decode")
    component = replace(part.provided.component, name="ngram")
    other = replace(part, provided=replace(part.provided, component=component))
    parts = tuple(other if one is part else one for one in description.parts)
    with pytest.raises(ConfigError, match="decode=ngram .* simulate with decode=plain"):
        build_simulation(PipelineDescription(parts), load_cost("gpu"))


def test_a_prefill_that_wants_to_know_is_told_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, told = opened(), list[StepTime]()
    monkeypatch.setattr(simulation.prefill, "step_finished", told.append)
    result = simulate(simulation, Listed([Arrival(0.0, 600, 4)]))
    assert [(step.num_prefill_tokens, step.num_decodes) for step in told] == [(512, 0), (88, 0), (0, 1), (0, 1), (0, 1)]
    assert sum(step.seconds for step in told) == pytest.approx(result.steps.busy_s)
    assert told[1].num_attended == sum(range(513, 601))
