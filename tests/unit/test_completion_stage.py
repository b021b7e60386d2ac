"""What `standard` has beside the contract of stage 9: repetition as its slow twin sees it, a bounded window, and timings."""

from __future__ import annotations

import itertools

import pytest

from core.batch import Verdict
from core.outputs import Timings
from core.request import FinishReason, RepetitionDetection
from core.stages.completion import Standard, ends_in_repetition, timings_of
from core.testing.completion import CompletionContract, make_request


class Judge(CompletionContract):
    """For its `judge`; by its name pytest does not take it for tests."""

    component = Standard


judge = Judge().judge


def slow_repetition(ids: tuple[int, ...], rule: RepetitionDetection) -> bool:
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        if len(ids) >= size * rule.min_count and ids[-size * rule.min_count :] == ids[-size:] * rule.min_count:
            return True
    return False


@pytest.mark.parametrize(("low", "high", "count"), [(1, 3, 2), (1, 4, 3), (2, 3, 2), (3, 3, 3), (1, 1, 4)])
def test_repetition_equals_its_slow_twin(low: int, high: int, count: int) -> None:
    rule = RepetitionDetection(min_pattern_size=low, max_pattern_size=high, min_count=count)
    for length in range(10):
        for ids in itertools.product((0, 1), repeat=length):
            assert ends_in_repetition(ids, rule) == slow_repetition(ids, rule)


def test_repetition_reads_a_bounded_window() -> None:
    rule = RepetitionDetection(max_pattern_size=10**9, min_count=10**9)
    assert judge(
        make_request([7] * 10_000, max_tokens=10**6, repetition_detection=rule), 7, max_model_len=10**6
    ) == Verdict((7,))
    long = RepetitionDetection(max_pattern_size=2000, min_count=2)
    pattern = list(range(1500))
    found = judge(make_request(pattern + pattern[:-1], max_tokens=10**6, repetition_detection=long), 1499)
    assert found == Verdict((1499,), FinishReason.REPETITION)


def test_odd_rules_never_raise() -> None:
    for low, high, count in itertools.product((-1, 0, 1, 5), (-1, 0, 1), (-1, 0, 1)):
        rule = RepetitionDetection(min_pattern_size=low, max_pattern_size=high, min_count=count)
        assert ends_in_repetition((), rule) is False
        assert ends_in_repetition((5, 5), rule) is (low <= 1 and high == 1)


def test_timings() -> None:
    assert timings_of(10.0, 10.5, 11.0, 14.0, 4) == Timings(queue=0.5, ttft=1.0, tpot=1.0, e2e=4.0)
    assert timings_of(10.0, 10.5, 11.0, 11.0, 1) == Timings(queue=0.5, ttft=1.0, tpot=None, e2e=1.0)


def test_timings_survive_an_abort_and_a_clock_that_steps_back() -> None:
    """P4."""
    assert timings_of(10.0, None, None, None, 0) == Timings()
    assert timings_of(10.0, 9.0, 8.0, 7.0, 3) == Timings(queue=0.0, ttft=0.0, tpot=0.0, e2e=0.0)
