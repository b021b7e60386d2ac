"""Stage 9, token side: which ids are kept, why a request ends, and the numbers of usage and timings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from core.batch import SamplerOutput, ScheduledRequest, SchedulerOutput, Verdict
from core.outputs import Timings
from core.request import FinishReason, RepetitionDetection, Request, RequestStatus, SamplingParams
from core.stages.completion import CompletionContext, Standard, ends_in_repetition, timings_of
from core.testing.sampler_reference import spec_of

EOS = 2


def stage(max_model_len: int = 4096) -> Standard:
    model = replace(spec_of(100, frozenset({EOS, 3})), max_model_len=max_model_len)
    return Standard(Standard.Settings(), CompletionContext(model))


def make_request(output: list[int] | None = None, **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 50, **params})  # type: ignore[arg-type]
    return Request("r", [1, 1, 1, 1], sampling, output_token_ids=list(output or []))


def judge(
    request: Request, *token_ids: int, max_model_len: int = 4096, errors: dict[str, str] | None = None
) -> Verdict | None:
    output = SchedulerOutput(0, (ScheduledRequest(request, 0, 1),))
    sampled = SamplerOutput({"r": token_ids} if token_ids else {}, errors=errors or {})
    return stage(max_model_len).judge(output, sampled).get("r")


def test_a_request_goes_on() -> None:
    assert judge(make_request(), 5) == Verdict((5,))


def test_eos_is_kept_and_has_no_stop_reason() -> None:
    assert judge(make_request(), EOS) == Verdict((EOS,), FinishReason.STOP)
    assert judge(make_request(), 3) == Verdict((3,), FinishReason.STOP)
    assert judge(make_request(ignore_eos=True), EOS) == Verdict((EOS,))


def test_stop_token_ids_name_the_id() -> None:
    assert judge(make_request(stop_token_ids=(9,)), 9) == Verdict((9,), FinishReason.STOP, 9)
    assert judge(make_request(stop_token_ids=(EOS,), ignore_eos=True), EOS) == Verdict((EOS,), FinishReason.STOP, EOS)


@pytest.mark.parametrize("end", [EOS, 9])
def test_no_stop_before_min_tokens(end: int) -> None:
    asked = {"min_tokens": 2, "stop_token_ids": (9,)}
    assert judge(make_request([5], **asked), end) == Verdict((end,))
    found = judge(make_request([5, 5], **asked), end)
    assert found is not None and found.finish_reason is FinishReason.STOP


def test_length_by_max_tokens_and_by_context() -> None:
    assert judge(make_request([5, 5], max_tokens=4), 5) == Verdict((5,))
    assert judge(make_request([5, 5], max_tokens=3), 5) == Verdict((5,), FinishReason.LENGTH)
    assert judge(make_request([5, 5]), 5, max_model_len=8) == Verdict((5,))
    assert judge(make_request([5, 5]), 5, max_model_len=7) == Verdict((5,), FinishReason.LENGTH)


def test_eos_comes_before_length_and_length_before_repetition() -> None:
    assert judge(make_request([5, 5], max_tokens=3), EOS) == Verdict((EOS,), FinishReason.STOP)
    rule = RepetitionDetection(max_pattern_size=2)
    found = judge(make_request([5, 5], max_tokens=3, repetition_detection=rule), 5)
    assert found == Verdict((5,), FinishReason.LENGTH)


def test_several_tokens_are_cut_after_the_first_end() -> None:
    assert judge(make_request(), 5, EOS, 6, EOS) == Verdict((5, EOS), FinishReason.STOP)
    assert judge(make_request([5], max_tokens=3), 6, 7, 8) == Verdict((6, 7), FinishReason.LENGTH)
    assert judge(make_request(min_tokens=2), EOS, EOS, EOS, 5) == Verdict((EOS, EOS, EOS), FinishReason.STOP)
    rule = RepetitionDetection(max_pattern_size=1, min_count=4)
    found = judge(make_request([7, 7], repetition_detection=rule), 7, 7, 7)
    assert found == Verdict((7, 7), FinishReason.REPETITION)


def test_errors_end_and_ended_or_unsampled_requests_are_left_alone() -> None:
    assert judge(make_request(), errors={"r": "NaN"}) == Verdict((), FinishReason.ERROR)
    assert judge(make_request()) is None
    aborted = make_request()
    aborted.status = RequestStatus.FINISHED_ABORTED
    assert judge(aborted, 5) is None
    preempted = make_request()
    preempted.status = RequestStatus.PREEMPTED
    assert judge(preempted, 5) == Verdict((5,))


def test_repetition_waits_for_min_tokens() -> None:
    rule = RepetitionDetection(max_pattern_size=1, min_count=2)
    assert judge(make_request([7], repetition_detection=rule, min_tokens=5), 7) == Verdict((7,))
    assert judge(make_request([7], repetition_detection=rule), 7) == Verdict((7,), FinishReason.REPETITION)


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
