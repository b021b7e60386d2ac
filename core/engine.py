"""The engine: stages 4 to 9 of every request in flight, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.batch import ModelBatch, SamplerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs, Verdict
from core.model.interface import StepResult
from core.outputs import StepOutput, StepStats, TokenDelta
from core.pipeline import EnginePipeline
from core.request import EngineRequest, FinishReason, Request
from core.wire import EngineInfo

log = logging.getLogger("nonet.engine")

MAX_LOST_STEPS = 3
MAX_STALLED_STEPS = 1000
STALL_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Times:
    """Clock readings between the stages of one step, in seconds."""

    previous: float  # when the step before ended; `start` where the engine was idle
    start: float
    scheduled: float
    built: float
    executed: float
    ended: float


class Engine:
    """Owns every request between admission and completion. One thread calls it; `step()` is the whole architecture."""

    def __init__(self, pipeline: EnginePipeline, info: EngineInfo):
        self._pipeline = pipeline
        self._info = info
        self._scheduler = pipeline.scheduler
        self._executor = pipeline.executor
        self._build = pipeline.batch_builder.build
        self._judge = pipeline.completion.judge
        self._clock = pipeline.clock
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._last_step = 0
        self._step_ended: float | None = None  # of the step before, while there is work
        self._num_stalled = 0  # empty plans in a row, while requests wait
        self._lost_steps = 0  # in a row, in which every one of several requests failed

    def step(self) -> StepOutput:
        """One iteration. Returns the new tokens of every request that got some, and the step's numbers."""
        start = self._clock()
        plan = self._scheduler.schedule()  # 4 scheduler: who runs; asks 5 prefill and 6 decode how many tokens each
        if plan.is_empty:
            return self._idle(plan)
        self._num_stalled = 0
        scheduled = self._clock()
        batch = self._build(plan)  # 5 prefill chunks and 6 decodes, in one mixed batch
        built = self._clock()
        result = self._execute(plan, batch)  # the model, then 7 sampler, where the model lives
        executed = self._clock()
        verdicts = self._judge(plan, result.sampled)  # 9 completion: which tokens count, and what has ended
        ended = self._scheduler.update(plan, verdicts)  # tokens appended, blocks of ended requests back
        deltas = self._deltas(plan, result.sampled, verdicts, ended)  # 8 detokenizer makes text of them, in the front
        self._forget([*ended, *plan.preempted, *plan.refused])
        times = Times(self._step_ended or start, start, scheduled, built, executed, self._clock())
        return StepOutput(deltas=deltas, stats=self._stats(plan, batch, result, times))

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for message in requests:
            self._scheduler.add(Request.from_engine_request(message))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown and ended ids are ignored: an abort may cross the request's end."""
        self._forget(self._scheduler.finish(request_ids, FinishReason.ABORT))

    def has_work(self) -> bool:
        return any(self._scheduler.counts())

    def reset_prefix_cache(self) -> bool:
        return self._pipeline.cache.reset()

    def info(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        self._executor.close()

    def _execute(self, plan: SchedulerOutput, batch: ModelBatch) -> StepResult:
        try:
            result = self._executor.submit(batch).result()
            self._lost_steps = 0
        except Exception as error:  # a plugin may raise anything; one request must not take the batch with it
            log.exception("step %d failed; its %d requests are run one by one", plan.step, len(plan.scheduled))
            if len(plan.scheduled) == 1:
                return StepResult(_failed(plan.scheduled[0], error))
            result = self._execute_one_by_one(plan)
        return self._without_strays(result)

    def _without_strays(self, result: StepResult) -> StepResult:
        """A sampler plugin's ids that are none of the model's fail the requests they were meant for."""
        size, sampled = self._pipeline.model.vocab_size, result.sampled
        strays = {
            request_id: f"the sampler returned {ids!r}, which are no token ids of the model"
            for request_id, ids in sampled.token_ids.items()
            if not all(type(token_id) is int and 0 <= token_id < size for token_id in ids)
        }
        if not strays:
            return result
        kept = {request_id: ids for request_id, ids in sampled.token_ids.items() if request_id not in strays}
        return replace(result, sampled=replace(sampled, token_ids=kept, errors={**sampled.errors, **strays}))

    def _execute_one_by_one(self, plan: SchedulerOutput) -> StepResult:
        """Find who broke the step. KV writes are idempotent, so running a request's share again is safe.

        When nobody's share runs, for `MAX_LOST_STEPS` steps in a row, it is not a request that is broken but the device
        or a plugin: the error passes, the engine process ends and is started again.
        """
        outputs, errors = [], []
        for part in plan.scheduled:
            alone = SchedulerOutput(step=plan.step, scheduled=(part,))
            try:
                outputs.append(self._executor.submit(self._build(alone)).result().sampled)
            except Exception as error:  # this is the one
                errors.append(error)
                outputs.append(_failed(part, error))
        self._lost_steps = self._lost_steps + 1 if len(errors) == len(plan.scheduled) else 0
        if self._lost_steps >= MAX_LOST_STEPS:
            raise errors[-1]
        return StepResult(_merged(outputs))

    def _idle(self, plan: SchedulerOutput) -> StepOutput:
        """Nothing can run. The step loop comes here once after its work has ended: time to check the pool's books."""
        self._step_ended = None
        self._forget([*plan.preempted, *plan.refused])
        if not self.has_work():
            self._pipeline.cache.check()
        elif not plan.refused:
            self._stall()
        return StepOutput(deltas=[_ending(request) for request in plan.refused], stats=self._gauges())

    def _stall(self) -> None:
        """Requests wait and nothing was planned. A pause, so that two processes do not spin; then the engine gives up."""
        self._num_stalled += 1
        if self._num_stalled >= MAX_STALLED_STEPS:
            raise RuntimeError(
                f"nothing was planned in {self._num_stalled} steps, though {self._scheduler.counts()} wait"
            )
        time.sleep(STALL_PAUSE_S)

    def _deltas(
        self, plan: SchedulerOutput, sampled: SamplerOutput, verdicts: Mapping[str, Verdict], ended: Sequence[Request]
    ) -> list[TokenDelta]:
        """One delta for each request with new tokens, and for each that ended in whatever way."""
        self._collect_prompt_logprobs(plan, sampled)
        deltas = []
        for part in plan.scheduled:
            verdict = verdicts.get(part.request.request_id)
            if verdict is not None and (verdict.token_ids or verdict.finish_reason):
                deltas.append(self._delta(part.request, verdict, sampled))
        told = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        return deltas + [_ending(r) for r in (*plan.refused, *ended) if r.request_id not in told]

    def _delta(self, request: Request, verdict: Verdict, sampled: SamplerOutput) -> TokenDelta:
        key = request.request_id
        logprobs = sampled.logprobs.get(key, ())[: len(verdict.token_ids)]
        return TokenDelta(
            request_id=key,
            token_ids=list(verdict.token_ids),
            logprobs=list(logprobs),
            prompt_logprobs=self._prompt_logprobs.pop(key, []),
            finish_reason=verdict.finish_reason,
            stop_reason=verdict.stop_reason,
            error=sampled.errors.get(key),
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_time=request.first_scheduled_time,
        )

    def _collect_prompt_logprobs(self, plan: SchedulerOutput, sampled: SamplerOutput) -> None:
        """A prompt's chunks add up to one list, sent with the first token; a recomputed prompt is not sent twice."""
        for part in plan.scheduled:
            rows = sampled.prompt_logprobs.get(part.request.request_id)
            already_sent = part.request.num_output_tokens > int(part.samples)
            if rows and not already_sent:
                have = self._prompt_logprobs.setdefault(part.request.request_id, [])
                del have[part.start :]  # a preempted prompt starts over
                have.extend(rows)

    def _forget(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self._executor.forget([request.request_id for request in requests])
        for request in requests:
            if request.is_finished:
                self._prompt_logprobs.pop(request.request_id, None)

    def _gauges(self) -> StepStats:
        running, waiting = self._scheduler.counts()
        cache = self._pipeline.cache
        return StepStats(
            step=self._last_step,
            running=running,
            waiting=waiting,
            kv_blocks_free=cache.num_free_blocks,
            kv_blocks_total=cache.num_blocks,
        )

    def _stats(self, plan: SchedulerOutput, batch: ModelBatch, result: StepResult, times: Times) -> StepStats:
        self._last_step = plan.step
        self._step_ended = times.ended if self.has_work() else None
        running, waiting = self._scheduler.counts()
        cache = self._pipeline.cache
        forward_s = result.forward_s or times.executed - times.built - result.sample_s
        return StepStats(
            step=plan.step,
            num_requests=len(plan.scheduled),
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_preemptions=len(plan.preempted),
            num_cached_tokens=sum(
                p.request.num_cached_tokens for p in plan.scheduled if p.start == p.request.num_cached_tokens
            ),
            running=running,
            waiting=waiting,
            kv_blocks_free=cache.num_free_blocks,
            kv_blocks_total=cache.num_blocks,
            between_s=times.start - times.previous,
            schedule_s=times.scheduled - times.start,
            build_s=times.built - times.scheduled,
            forward_s=forward_s,
            sample_s=result.sample_s,
            output_s=times.ended - times.executed,
        )


def _failed(part: ScheduledRequest, error: Exception) -> SamplerOutput:
    return SamplerOutput(token_ids={}, errors={part.request.request_id: f"{type(error).__name__}: {error}"})


def _merged(outputs: Sequence[SamplerOutput]) -> SamplerOutput:
    return SamplerOutput(
        token_ids={k: v for o in outputs for k, v in o.token_ids.items()},
        logprobs={k: v for o in outputs for k, v in o.logprobs.items()},
        prompt_logprobs={k: v for o in outputs for k, v in o.prompt_logprobs.items()},
        errors={k: v for o in outputs for k, v in o.errors.items()},
    )


def _ending(request: Request) -> TokenDelta:
    """The end of a request that no verdict announced: refused by the scheduler, or left out by the sampler."""
    reason = request.finish_reason or FinishReason.ERROR
    error = str(request.stop_reason) if reason is FinishReason.ERROR else None
    return TokenDelta(request_id=request.request_id, finish_reason=reason, error=error)
