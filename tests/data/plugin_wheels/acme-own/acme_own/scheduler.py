from collections.abc import Mapping

from core.batch import ScheduledRequest, SchedulerOutput, Verdict
from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus
from core.stages.scheduler import Counts, SchedulerContext, SchedulerSettings


class OwnScheduler:
    """In order of arrival; the youngest gives way. It frees what a failed request wrote as it frees all else."""

    class Settings(SchedulerSettings):
        pass

    def __init__(self, settings: Settings, context: SchedulerContext):
        self._settings = settings
        self._context = context
        self._requests: dict[str, Request] = {}
        self._step = 0

    def add(self, request: Request) -> None:
        self._requests.setdefault(request.request_id, request)

    def schedule(self) -> SchedulerOutput:
        budget, parts, preempted = self._settings.max_num_scheduled_tokens, [], []
        first = [request for request in self._requests.values() if not request.num_pending_tokens]
        while first and budget and len(parts) < self._settings.max_num_running_reqs:
            request = first.pop(0)
            num_tokens = self._reserve(request, budget)
            while num_tokens is None and self._is_running(request) and any(map(self._is_running, first)):
                preempted.append(self._preempt(first))
                num_tokens = self._reserve(request, budget)
            if num_tokens:
                parts.append(self._plan(request, num_tokens))
                budget -= num_tokens
        self._step += 1
        return SchedulerOutput(self._step, tuple(parts), tuple(preempted))

    def _reserve(self, request: Request, budget: int) -> int | None:
        """Tokens of this step; None where blocks lack."""
        if not self._is_running(request):
            request.num_computed_tokens = self._context.cache.lookup(request)
        left = request.num_tokens - request.num_computed_tokens
        num_tokens = self._context.prefill.num_tokens(request, left, budget) if left > 1 else 1
        if num_tokens and self._context.cache.allocate(request, request.num_computed_tokens + num_tokens):
            return num_tokens
        if not self._is_running(request):
            self._context.cache.free(request)
            request.num_computed_tokens = 0
        return None if num_tokens else 0

    def _plan(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        if request.first_scheduled_time is None:
            request.first_scheduled_time, request.num_cached_tokens = self._context.clock(), start
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens += num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        request.num_pending_tokens = int(samples)
        return ScheduledRequest(request, start, num_tokens, samples=samples)

    def _preempt(self, requests: list[Request]) -> Request:
        victim = [request for request in requests if self._is_running(request)][-1]
        self._context.cache.free(victim)
        victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0
        victim.num_preemptions += 1
        return victim

    def _is_running(self, request: Request) -> bool:
        return request.status is RequestStatus.RUNNING

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        ended = []
        for part in output.scheduled:
            request, verdict = part.request, verdicts.get(part.request.request_id)
            request.num_pending_tokens = 0
            if request.request_id not in self._requests:
                continue
            if verdict is not None:
                # `append_output` came with API 1.1; before, the ids were added by hand
                getattr(request, "append_output", request.output_token_ids.extend)(verdict.token_ids)
            if self._is_running(request):
                self._context.cache.commit(request, part.start + part.num_tokens)
            if verdict is not None and verdict.finish_reason is not None:
                request.stop_reason = verdict.stop_reason
                ended += self.finish([request.request_id], verdict.finish_reason)
        return ended

    def finish(self, request_ids, reason: FinishReason) -> list[Request]:
        ended = [self._requests.pop(key) for key in request_ids if key in self._requests]
        for request in ended:
            self._context.cache.free(request)
            request.status, request.finish_reason = STATUS_OF_REASON[reason], reason
        return ended

    def counts(self) -> Counts:
        running = sum(map(self._is_running, self._requests.values()))
        return Counts(running, len(self._requests) - running)
