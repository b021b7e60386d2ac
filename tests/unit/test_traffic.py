"""Traffic that is made up has the statistics that it claims, and the same seed gives the same traffic."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from core.errors import ConfigError
from core.simulation.lengths import Lengths, MonotoneCubic
from core.simulation.prompts import BLOCK
from core.simulation.records import Arrival
from core.simulation.traffic import WORKLOADS, TrafficSettings, open_traffic

TARGETS = {
    "conversation": ((1020, 2734, 4142), (129, 424, 601), 5.5),
    "code": ((1469, 5186, 7436), (13, 55, 249), 2.6),
}


def arrivals(**keys: object) -> list[Arrival]:
    return list(open_traffic(TrafficSettings.model_validate(keys)))


def quantiles(values: list[int]) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.5, 0.9, 0.99))]


@pytest.mark.parametrize("workload", TARGETS)
def test_quantiles_and_rate_are_within_two_percent_of_the_services(workload):
    prompts, outputs, rate = TARGETS[workload]
    found = arrivals(workload=workload, num_requests=500_000, seed=7)
    assert quantiles([one.num_prompt_tokens for one in found]) == pytest.approx(prompts, rel=0.02)
    assert quantiles([one.num_output_tokens for one in found]) == pytest.approx(outputs, rel=0.02)
    assert len(found) / found[-1].time_s == pytest.approx(rate, rel=0.02)
    assert min(one.num_output_tokens for one in found) >= 1


@pytest.mark.parametrize(("cv", "expected"), [(0.0, 0.0), (1.0, 1.0), (3.0, 3.0)])
def test_gaps_have_the_variation_asked_for(cv, expected):
    times = np.array([one.time_s for one in arrivals(num_requests=200_000, cv=cv, rate=10)])
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.03, abs=1e-6)


def test_the_seed_decides_and_each_column_has_a_stream_of_its_own():
    plain = arrivals(num_requests=300, seed=3)
    assert arrivals(num_requests=300, seed=3) == plain
    assert arrivals(num_requests=300, seed=4) != plain
    other = arrivals(num_requests=300, seed=3, rate=55.0, tenants=5, system_prompts=2, followups=0.5, priorities=[1, 1])
    assert [one.num_prompt_tokens for one in other] == [one.num_prompt_tokens for one in plain]
    assert [one.num_output_tokens for one in other] == [one.num_output_tokens for one in plain]
    assert [one.time_s * 10 for one in other] == pytest.approx([one.time_s for one in plain])


def test_iterating_again_gives_the_same_arrivals():
    traffic = open_traffic(TrafficSettings(num_requests=20_000, tenants=3, followups=0.5))
    assert list(traffic) == list(traffic)


def test_tenants_and_priorities_come_in_their_shares():
    found = arrivals(num_requests=100_000, tenants=8, flood=13, priorities=[0.2, 0, 0.8])
    assert sum(one.tenant == "t0" for one in found) / len(found) == pytest.approx(13 / 20, abs=0.01)
    assert sum(one.tenant == "t7" for one in found) / len(found) == pytest.approx(1 / 20, abs=0.01)
    assert {one.priority for one in found} == {0, 2}
    own = arrivals(num_requests=100_000, tenants=2, shares=[1, 3])
    assert sum(one.tenant == "t1" for one in own) / len(own) == pytest.approx(0.75, abs=0.01)


def test_bounds_that_clients_ask_for():
    truth = [one.num_output_tokens for one in arrivals(num_requests=5_000, bound="exact")]
    doubled = arrivals(num_requests=5_000, bound="power_of_two")
    assert [one.num_output_tokens for one in doubled] == truth
    for one in doubled:
        assert one.max_tokens == max(16, 1 << (one.num_output_tokens - 1).bit_length())
    fixed = arrivals(num_requests=5_000, bound="100")
    assert {one.max_tokens for one in fixed} == {100}
    assert [one.num_output_tokens for one in fixed] == [min(length, 100) for length in truth]


def test_mixed_has_two_kinds_that_are_tenants_of_their_own():
    found = arrivals(workload="mixed", num_requests=50_000, short_share=0.8)
    short = [one for one in found if one.tenant == "short"]
    long = [one for one in found if one.tenant == "long"]
    assert len(short) + len(long) == len(found)
    assert len(short) / len(found) == pytest.approx(0.8, abs=0.01)
    assert {one.priority for one in short} == {0} and {one.priority for one in long} == {1}
    assert quantiles([one.num_prompt_tokens for one in short]) == pytest.approx((200, 600, 1_200), rel=0.03)
    assert quantiles([one.num_prompt_tokens for one in long]) == pytest.approx((500, 1_500, 3_000), rel=0.05)


def test_fixed_is_what_it_says_and_lengths_can_be_given():
    assert {(a.num_prompt_tokens, a.num_output_tokens) for a in arrivals(workload="fixed", num_requests=100)} == {
        (512, 128)
    }
    found = arrivals(workload="fixed", num_requests=100_000, prompt_len=9, output_len={"p50": 20, "p90": 40, "p99": 90})
    assert {one.num_prompt_tokens for one in found} == {9}
    assert quantiles([one.num_output_tokens for one in found]) == pytest.approx((20, 40, 90), rel=0.02)


def test_a_system_prompt_is_shared_up_to_its_length():
    found = arrivals(num_requests=2_000, system_prompts=3, system_prompt_len=4 * BLOCK)
    heads = {one.block_hashes[:4] for one in found if one.num_prompt_tokens >= 4 * BLOCK}
    assert len(heads) == 3
    for one in found:
        assert len(one.block_hashes) == -(-one.num_prompt_tokens // BLOCK)
    rest = [number for one in found for number in one.block_hashes[4:]]
    assert len(set(rest)) == len(rest)


def test_followups_repeat_a_conversation_and_keep_the_lengths():
    plain = arrivals(num_requests=3_000, seed=2)
    found = arrivals(num_requests=3_000, seed=2, followups=0.5, think_s=5)
    assert [one.num_prompt_tokens for one in found] == [one.num_prompt_tokens for one in plain]
    begun: dict[int, Arrival] = {}  # first block -> the latest turn
    num_followups = 0
    for one in found:
        if (earlier := begun.get(one.block_hashes[0])) is not None:
            num_followups += 1
            assert one.time_s >= earlier.time_s + 5
            assert one.num_prompt_tokens > earlier.num_prompt_tokens + earlier.num_output_tokens
            whole = earlier.num_prompt_tokens // BLOCK
            assert one.block_hashes[:whole] == earlier.block_hashes[:whole]
        begun[one.block_hashes[0]] = one
    assert 0.3 < num_followups / len(found) <= 0.5


def test_keys_that_contradict_each_other_are_refused():
    for keys, word in (
        ({"rate": 1, "load": 1}, "rate and load"),
        ({"tenants": 3, "shares": [1, 2]}, "shares has 2 numbers for tenants=3"),
        ({"priorities": [0, 0]}, "priorities"),
        ({"start_s": 5, "end_s": 4}, "end_s"),
        ({"bound": 0}, "bound"),
        ({"prompt_len": {"p50": 20, "p90": 10, "p99": 30}}, "p50 <= p90"),
    ):
        with pytest.raises(ValidationError, match=word):
            TrafficSettings.model_validate(keys)
    with pytest.raises(ConfigError, match="did you mean conversation"):
        open_traffic(TrafficSettings(workload="conversations"))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"path": "x"}, "path is for traces, and does nothing to workload=conversation"),
        ({"speedup": 2}, "speedup is for traces, .*; rate=… says"),
        ({"start_s": 3}, "start_s is for traces"),
        ({"tenant_column": "user"}, "tenant_column is for traces"),
        ({"hash_block_size": 64}, "hash_block_size is for workload=mooncake,"),
        (
            {"workload": "code", "short_share": 0.5},
            "short_share is for workload=mixed, and does nothing to workload=code",
        ),
        ({"think_s": 3}, "think_s does nothing without followups=…"),
        ({"system_prompt_len": 64}, "system_prompt_len does nothing without system_prompts=…"),
        ({"flood": 5}, "flood does nothing without tenants=2"),
        ({"tenants": 2, "shares": [1, 2], "flood": 5}, "flood does nothing .* beside shares"),
        ({"workload": "azure", "path": "x", "cv": 2}, "cv is for workload=conversation, code, mixed, fixed, and does"),
        ({"workload": "azure", "path": "x", "prompt_len": 9}, "prompt_len is for workload=conversation"),
        ({"workload": "burstgpt", "path": "x", "output_len": 9}, "output_len is for workload=conversation"),
        ({"workload": "azure", "path": "x", "hash_block_size": 64}, "hash_block_size is for workload=mooncake"),
        (
            {"workload": "mooncake", "path": "x", "system_prompts": 2},
            "system_prompts is for .* burstgpt, and does nothing",
        ),
        (
            {"workload": "azure", "path": "x", "tenant_column": "u", "tenants": 3},
            "tenants does nothing beside tenant_column",
        ),
    ],
)
def test_a_key_that_would_do_nothing_is_refused_by_name(keys, says):
    with pytest.raises(ConfigError, match=says) as caught:
        open_traffic(TrafficSettings.model_validate(keys))
    assert caught.value.key in keys and str(caught.value).startswith(caught.value.key)


def test_every_key_is_of_use_to_some_workload_and_nothing_is_said_of_null():
    assert frozenset.union(*(one.keys for one in WORKLOADS.values())) == set(TrafficSettings.model_fields)
    open_traffic(TrafficSettings(path=None, end_s=None, tenant_column=None))


@pytest.mark.parametrize("values", [(1020, 2734, 4142), (13, 55, 249), (5, 5, 9), (7, 7, 7), (1, 1, 2000)])
def test_a_quantile_function_is_monotone_and_goes_through_its_points(values):
    lengths = Lengths(p50=values[0], p90=values[1], p99=values[2], cap=100_000)
    assert [lengths.quantile(q) for q in (0.5, 0.9, 0.99)] == list(values)
    steps = np.diff(lengths.at(np.linspace(-6, 6, 10_001)))
    assert (steps >= 0).all()
    assert lengths.at(np.array([-40.0, 40.0])).tolist()[0] >= 1


def test_the_curve_has_no_kinks():
    curve = MonotoneCubic((0.0, 1.0, 3.0), (0.0, 2.0, 3.0))
    at = np.array([-1.0, 0.0, 1.0, 3.0, 4.0])
    before, after = curve(at) - curve(at - 1e-6), curve(at + 1e-6) - curve(at)
    assert after == pytest.approx(before, rel=1e-3)
    assert curve(np.array([-1.0, 4.0])) == pytest.approx([-2.0, 3.5])


def test_lengths_never_pass_their_cap():
    drawn = Lengths(p50=100, p90=400, p99=900, cap=1_000).draw(np.random.default_rng(0), 100_000)
    assert drawn.max() == 1_000 and drawn.min() >= 1
