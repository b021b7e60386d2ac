"""A scheduler that uses nothing of this project but the contract is guarded like ours."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from core.batch import ScheduledRequest, SchedulerOutput
from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus
from core.stages.scheduler import Counts
from core.testing.harness.engine_isolation import (
    VICTIM,
    Chaos,
    assert_solo,
    assert_whole,
    engine_of,
    parts_with,
    requests,
    run,
)


class Turns:
    """One request at a time, in turn, and of this project's code it uses nothing but the contract."""

    def __init__(self, settings: Any, context: Any):
        self.context, self.requests, self.step = context, {}, 0

    def add(self, request: Request) -> None:
        self.requests.setdefault(request.request_id, request)

    def schedule(self) -> SchedulerOutput:
        self.step += 1
        for request in list(self.requests.values()):
            count = self._give(request)
            if count:
                self.requests[request.request_id] = self.requests.pop(request.request_id)  # to the end of the row
                start = request.num_computed_tokens
                request.num_computed_tokens += count
                samples = request.num_computed_tokens == request.num_known_tokens
                request.num_pending_tokens += samples
                return SchedulerOutput(self.step, (ScheduledRequest(request, start, count, 0, samples),))
        return SchedulerOutput(self.step)

    def _give(self, request: Request) -> int:
        cache = self.context.cache
        if request.status is not RequestStatus.RUNNING:
            request.num_computed_tokens = cache.lookup(request)
        left = request.num_known_tokens - request.num_computed_tokens
        count = self.context.prefill.num_tokens(request, left, 64) if left > 1 else 1
        self.context.decode.propose([request])
        if not count or not cache.allocate(request, request.num_computed_tokens + count):
            return 0
        request.status = RequestStatus.RUNNING
        return count

    def update(self, output: SchedulerOutput, verdicts: Any) -> list[Request]:
        ended = []
        for part in output.scheduled:
            verdict = verdicts.get(part.request.request_id)
            part.request.num_pending_tokens = 0
            if verdict:
                part.request.append_output(verdict.token_ids)
                if verdict.finish_reason:
                    ended += self.finish([part.request.request_id], verdict.finish_reason)
        return ended

    def finish(self, request_ids: Any, reason: FinishReason) -> list[Request]:
        ended = [self.requests.pop(key) for key in request_ids if key in self.requests]
        for request in ended:
            self.context.cache.free(request, discard=reason is FinishReason.ERROR)
            request.status, request.finish_reason = STATUS_OF_REASON[reason], reason
        return ended

    def counts(self) -> Counts:
        return Counts(running=len(self.requests))


@pytest.mark.parametrize("stage", ["prefill", "decode", "completion", "cache", "executor"])
def test_a_scheduler_that_is_a_class_of_its_own_is_guarded_like_ours(stage: str) -> None:
    chaos = Chaos("raise")
    engine, sent = engine_of(Turns, **parts_with(stage, chaos)), requests()
    answers = run(engine, sent)
    assert chaos.fired
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith(f"{stage}=chaos")
    assert_whole(engine)


def test_deadlines_hold_with_a_scheduler_that_knows_nothing_of_them() -> None:
    """Plugin API 1.1 had none; a request that is past its own is not run for nobody."""
    engine, sent = engine_of(Turns), requests()
    late = structs.replace(sent[1], deadline=sent[1].arrival_time)
    timely = [structs.replace(one, deadline=one.arrival_time + 3600) for one in sent if one is not sent[1]]
    engine.add([timely[0], late, *timely[1:]])
    answers = run(engine, [])
    assert answers.ends(late.request_id) == [FinishReason.EXPIRED]
    assert all(answers.ends(one.request_id) == [FinishReason.LENGTH] for one in timely)
    assert_whole(engine)
