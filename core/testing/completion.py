"""What every completion must do, as tests::

class TestMine(CompletionContract):
    component = Mine
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.batch import SamplerOutput, ScheduledRequest, SchedulerOutput, Verdict
from core.request import FinishReason, RepetitionDetection, Request, RequestStatus, SamplingParams
from core.stages.completion import Completion, CompletionContext
from core.testing.contract import Contract
from core.testing.fakes import snapshot
from core.testing.sampler_reference import spec_of

EOS, OTHER_EOS = 2, 3
ENDS = pytest.mark.parametrize("end", [EOS, OTHER_EOS, 9])  # 9 is a stop_token_id in these tests


def make_request(output: list[int] | None = None, request_id: str = "r", **params: Any) -> Request:
    """A prompt of 4 tokens, and at most 50 to come."""
    sampling = SamplingParams(**{"max_tokens": 50, **params})
    return Request(request_id, [1, 1, 1, 1], sampling, output_token_ids=list(output or []))


class CompletionContract(Contract):
    def make_completion(self, max_model_len: int = 4096) -> Completion:
        model = replace(spec_of(100, frozenset({EOS, OTHER_EOS})), max_model_len=max_model_len)
        completion: Completion = self.make(CompletionContext(model))
        return completion

    def judge(
        self, request: Request, *token_ids: int, max_model_len: int = 4096, error: str | None = None
    ) -> Verdict | None:
        """Of one request alone in a step that sampled `token_ids`."""
        key = request.request_id
        output = SchedulerOutput(0, (ScheduledRequest(request, 0, 1),))
        sampled = SamplerOutput({key: token_ids} if token_ids else {}, errors={key: error} if error else {})
        return self.make_completion(max_model_len).judge(output, sampled).get(key)

    def test_a_request_goes_on(self) -> None:
        assert self.judge(make_request(), 5) == Verdict((5,))
        assert self.judge(make_request([5, 6]), 7, 8) == Verdict((7, 8))

    def test_eos_is_kept_and_has_no_stop_reason(self) -> None:
        assert self.judge(make_request(), EOS) == Verdict((EOS,), FinishReason.STOP)
        assert self.judge(make_request(), OTHER_EOS) == Verdict((OTHER_EOS,), FinishReason.STOP)

    def test_eos_is_a_token_like_others_where_it_is_to_be_ignored(self) -> None:
        assert self.judge(make_request(ignore_eos=True), EOS) == Verdict((EOS,))

    def test_stop_token_ids_name_the_id(self) -> None:
        assert self.judge(make_request(stop_token_ids=(9,)), 9) == Verdict((9,), FinishReason.STOP, 9)
        found = self.judge(make_request(stop_token_ids=(EOS,), ignore_eos=True), EOS)
        assert found == Verdict((EOS,), FinishReason.STOP, EOS)

    @ENDS
    def test_no_stop_before_min_tokens(self, end: int) -> None:
        asked: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (9,)}
        assert self.judge(make_request([5], **asked), end) == Verdict((end,)), "it ends before min_tokens"
        found = self.judge(make_request([5, 5], **asked), end)
        assert found is not None and found.finish_reason is FinishReason.STOP

    def test_length_by_max_tokens_and_by_context(self) -> None:
        assert self.judge(make_request([5, 5], max_tokens=4), 5) == Verdict((5,))
        assert self.judge(make_request([5, 5], max_tokens=3), 5) == Verdict((5,), FinishReason.LENGTH)
        assert self.judge(make_request([5, 5]), 5, max_model_len=8) == Verdict((5,))
        assert self.judge(make_request([5, 5]), 5, max_model_len=7) == Verdict((5,), FinishReason.LENGTH)

    def test_max_tokens_ends_also_what_min_tokens_and_ignore_eos_keep_going(self) -> None:
        asked: dict[str, Any] = {"min_tokens": 3, "max_tokens": 3, "ignore_eos": True}
        assert self.judge(make_request([5, 5], **asked), EOS) == Verdict((EOS,), FinishReason.LENGTH)

    def test_eos_comes_before_length_and_length_before_repetition(self) -> None:
        assert self.judge(make_request([5, 5], max_tokens=3), EOS) == Verdict((EOS,), FinishReason.STOP)
        rule = RepetitionDetection(max_pattern_size=2)
        found = self.judge(make_request([5, 5], max_tokens=3, repetition_detection=rule), 5)
        assert found == Verdict((5,), FinishReason.LENGTH)

    def test_what_repeats_itself_ends_after_min_tokens(self) -> None:
        rule = RepetitionDetection(max_pattern_size=1, min_count=2)
        assert self.judge(make_request([7], repetition_detection=rule, min_tokens=5), 7) == Verdict((7,))
        assert self.judge(make_request([7], repetition_detection=rule), 7) == Verdict((7,), FinishReason.REPETITION)
        assert self.judge(make_request([7]), 7) == Verdict((7,))

    def test_several_tokens_are_cut_after_the_first_end(self) -> None:
        assert self.judge(make_request(), 5, EOS, 6, EOS) == Verdict((5, EOS), FinishReason.STOP)
        assert self.judge(make_request([5], max_tokens=3), 6, 7, 8) == Verdict((6, 7), FinishReason.LENGTH)
        assert self.judge(make_request(min_tokens=2), EOS, EOS, EOS, 5) == Verdict((EOS, EOS, EOS), FinishReason.STOP)
        rule = RepetitionDetection(max_pattern_size=1, min_count=4)
        found = self.judge(make_request([7, 7], repetition_detection=rule), 7, 7, 7)
        assert found == Verdict((7, 7), FinishReason.REPETITION)

    def test_a_failed_request_ends_in_an_error(self) -> None:
        assert self.judge(make_request(), error="NaN") == Verdict((), FinishReason.ERROR)

    def test_ended_and_unsampled_requests_are_left_alone(self) -> None:
        assert self.judge(make_request()) is None
        aborted = make_request()
        aborted.status = RequestStatus.FINISHED_ABORTED
        assert self.judge(aborted, 5) is None

    def test_a_preempted_request_keeps_what_was_in_flight(self) -> None:
        preempted = make_request()
        preempted.status = RequestStatus.PREEMPTED
        assert self.judge(preempted, 5) == Verdict((5,))

    def test_each_request_is_judged_by_itself(self) -> None:
        """A batch gives each request the verdict that it gets alone; and no request is changed by it."""
        cases = [([], (5,)), ([5, 5], (EOS, 5)), ([7, 7], (9, 1)), ([5] * 48, (1, 2, 3)), ([4], (6,)), ([], ())]
        requests = [make_request(output, f"r{i}", stop_token_ids=(9,)) for i, (output, _) in enumerate(cases)]
        before = [snapshot(request) for request in requests]
        sampled = {
            r.request_id: ids for r, (_, ids) in zip(requests, cases, strict=True) if ids and r.request_id != "r4"
        }
        output = SchedulerOutput(0, tuple(ScheduledRequest(request, 0, 1) for request in requests))
        completion = self.make_completion()
        verdicts = completion.judge(output, SamplerOutput(sampled, errors={"r4": "NaN"}))
        for request in requests:
            key = request.request_id
            alone = self.judge(request, *sampled.get(key, ()), error="NaN" if key == "r4" else None)
            assert verdicts.get(key) == alone, f"{key} is judged otherwise beside others"
        assert [snapshot(request) for request in requests] == before
