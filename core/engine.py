"""The engine: stages 4 to 9 of every request in flight, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import structs

from core.batch import ModelBatch, SamplerOutput, SchedulerOutput, TokenLogprobs, Verdict
from core.errors import Terminated, described, told
from core.isolation.execution import Execution
from core.isolation.faults import SpoiltKVError, StageError, is_told
from core.isolation.recovery import Recovery
from core.isolation.scheduler import Live
from core.model.interface import StepResult
from core.model.roofline import Roofline
from core.outputs import PluginIncident, StepOutput, StepStats, TokenDelta
from core.pipeline import EnginePipeline
from core.request import EngineRequest, FinishReason, Request
from core.wire import EngineInfo

log = logging.getLogger("nonet.engine")

MAX_STALLED_STEPS = 1000
STALL_PAUSE_S = 0.005
NO_VERDICTS: Mapping[str, Verdict] = MappingProxyType({})
NOTHING_SAMPLED = SamplerOutput({})


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
    """Owns every request between admission and completion. One thread calls it; `step()` is the whole architecture.

    A plugin that fails takes with it the requests that it failed, and no others: see `core.isolation.stages` for stages 5, 6
    and 9, `core.isolation.execution` for the model and the sampler, `core.isolation.recovery` for the scheduler and the cache.
    """

    def __init__(self, pipeline: EnginePipeline, info: EngineInfo):
        self._info = info
        self._clock = pipeline.clock
        self._executor = pipeline.executor
        self._faults = pipeline.faults
        self._execution = Execution(pipeline.executor, pipeline.model.vocab_size, pipeline.faults)
        self._recovery = Recovery(pipeline.faults)
        self._endings: list[TokenDelta] = []  # of requests that failed outside the walk of a step
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._last_step = 0
        self._step_ended: float | None = None  # of the step before, while there is work
        self._num_recoveries = 0
        self._num_stalled = 0  # empty plans in a row, while requests wait
        self._use(pipeline)

    def _use(self, pipeline: EnginePipeline) -> None:
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler
        self._judge = pipeline.completion.judge

    def step(self) -> StepOutput:
        """One iteration. Returns the new tokens of every request that got some, and the step's numbers."""
        start = self._clock()
        try:
            plan = self._scheduler.schedule()  # 4 scheduler: who runs; asks 5 prefill and 6 decode how many tokens each
            self._endings += [self._ending(request) for request in plan.refused]
            self._execution.swap(self._pipeline.cache.take_copies())  # KV of preempted requests: out, and back in
            if plan.is_empty:
                return self._idle(plan)
            self._num_stalled = 0
            scheduled = self._clock()
            batch = self._build(plan)  # 5 prefill chunks and 6 decodes, in one mixed batch
            built = self._clock()
            result = self._run(plan, batch)  # the model, then 7 sampler, where the model lives
            executed = self._clock()
            verdicts = self._judge(plan, result.sampled)  # 9 completion: which tokens count, and what has ended
            ended = self._take_in(plan, verdicts)  # tokens appended, blocks of ended requests back
            deltas = self._deltas(plan, result.sampled, verdicts, ended)  # for 8 detokenizer, in the front
            self._forget([*ended, *plan.preempted, *plan.refused])
            times = Times(self._step_ended or start, start, scheduled, built, executed, self._clock())
            self._pipeline.prefill.step_finished(plan, times.ended - times.previous)
            return self._output(deltas, self._stats(plan, batch, result, times), result.incidents)
        except StageError as error:  # the books, or the KV, can no longer be trusted
            self._recover(error)
            return self._output([], self._gauges())

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for message in requests:
            try:
                self._scheduler.add(Request.from_engine_request(message))
            except StageError as error:
                self._recover(error)
                self._faults.requests.clear()  # not of the step to come

    def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown and ended ids are ignored: an abort may cross the request's end."""
        self._forget(self._finish(request_ids, FinishReason.ABORT))

    def has_work(self) -> bool:
        return bool(self._scheduler.live or self._endings)

    def reset_prefix_cache(self) -> bool:
        try:
            return self._pipeline.cache.reset()
        except StageError as error:
            self._faults.note(error.group, error.reason, error)
            self._renew({})
            return True

    def roofline(self) -> Roofline | None:
        """Measured now, which takes seconds; None where the model or its executor tells none."""
        measure = getattr(self._executor, "roofline", None)
        found = None if measure is None else measure()
        return found if isinstance(found, Roofline) else None

    def info(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        self._executor.close()

    def _build(self, plan: SchedulerOutput) -> ModelBatch:
        """Raises StageError naming the request that makes no batch: something else is where a list or a number was."""
        build = self._pipeline.batch_builder.build
        try:
            return build(plan)
        except (StageError, Terminated):
            raise
        except BaseException as error:  # wrong values of a plan raise anything
            for part in plan.scheduled if len(plan.scheduled) > 1 else ():
                self._build(SchedulerOutput(plan.step, (part,)))
            key = plan.scheduled[0].request.request_id if len(plan.scheduled) == 1 else None
            raise StageError("scheduler", f"it planned what makes no batch: {described(error)}", key) from error

    def _run(self, plan: SchedulerOutput, batch: ModelBatch) -> StepResult:
        """Raises SpoiltKVError where a request got NaN and shares KV: it may be the KV of the one that wrote it."""
        result = self._execution.run(plan, batch, self._build)
        if result.no_numbers and not self._faults.cautious:
            holdings = self._pipeline.cache.holdings
            own = {key: result.sampled.errors[key] for key in result.no_numbers if not holdings[key].num_found}
            if len(own) < len(result.no_numbers):
                self._faults.cautious = True
                self._faults.requests.update(own)
                raise SpoiltKVError("model", "it gave NaN to a request that shares KV with others")
        return result

    def _take_in(self, plan: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        """The scheduler's update, then the end of those that a stage has failed. Returns all that have ended."""
        if self._recovery.in_a_row and any(verdict.token_ids for verdict in verdicts.values()):
            self._recovery.progressed()
        try:
            ended = self._scheduler.update(plan, verdicts)
        except StageError as error:  # what the verdicts say holds all the same
            reasons = {key: verdict.finish_reason for key, verdict in verdicts.items() if verdict.finish_reason}
            ended = [self._scheduler.drop(key, reason) for key, reason in reasons.items()]
            self._recover(error, verdicts)
        if self._faults.requests:
            ended += self._finish(list(self._faults.requests), FinishReason.ERROR)
        return ended

    def _finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        """End requests from outside, whatever the scheduler makes of it. Unknown ids are ignored."""
        keys = [key for key in dict.fromkeys(request_ids) if key in self._scheduler.live]
        if not keys:
            return []
        try:
            return self._scheduler.finish(keys, reason)
        except StageError as error:
            self._faults.note(error.group, error.reason, error)
            ended = [self._scheduler.drop(key, reason) for key in keys]
            self._renew({})
            return ended

    def _recover(self, error: StageError, verdicts: Mapping[str, Verdict] = NO_VERDICTS) -> None:
        """Every request goes on but those at fault. `verdicts`: of the step in which it happened, once they are kept."""
        self._num_recoveries += 1
        if is_told(self._num_recoveries):
            log.error("%s; all requests in flight are computed again (time %d)", error, self._num_recoveries)
        self._renew(self._recovery.guilty(error, self._pipeline, self._scheduler.live, verdicts))

    def _renew(self, guilty: dict[str, str]) -> None:
        """New, empty books of blocks and requests. Requests keep their output, and the rest of them is computed again."""
        live = dict(self._scheduler.live)
        self._execution.forget(list(live))
        while not self._readded([request for key, request in live.items() if key not in guilty], guilty):
            pass
        for key, text in guilty.items():
            self._endings.append(TokenDelta(request_id=key, finish_reason=FinishReason.ERROR, error=text))

    def _readded(self, requests: Sequence[Live], guilty: dict[str, str]) -> bool:
        """False: one of them cannot even be added, and is among the guilty now."""
        self._use(self._pipeline.rebuild(self._faults))
        for request in requests:
            try:
                self._scheduler.add(request.again())
            except StageError as error:
                key = request.original.request_id
                guilty[key] = self._faults.fail(error.group, error.reason, key, error)
                return False
        return True

    def _idle(self, plan: SchedulerOutput) -> StepOutput:
        """Nothing can run. The step loop comes here once after its work has ended: time to check the pool's books."""
        self._step_ended = None
        ended = self._finish(list(self._faults.requests), FinishReason.ERROR)
        self._endings += [self._ending(request) for request in ended]
        self._forget([*plan.preempted, *plan.refused, *ended])
        if not self.has_work():
            self._pipeline.cache.check()
        elif not self._endings:
            self._stall()
        return self._output([], self._gauges())

    def _stall(self) -> None:
        """Requests wait and nothing was planned. A pause, so that two processes do not spin; then something must change."""
        self._num_stalled += 1
        if self._num_stalled >= MAX_STALLED_STEPS:
            self._num_stalled = 0
            raise StageError("scheduler", f"nothing was planned in {MAX_STALLED_STEPS} steps, though requests wait")
        time.sleep(STALL_PAUSE_S)

    def _output(
        self, deltas: list[TokenDelta], stats: StepStats, incidents: Sequence[PluginIncident] = ()
    ) -> StepOutput:
        for delta in self._endings:
            self._prompt_logprobs.pop(delta.request_id, None)
        deltas += self._endings
        self._endings = []
        self._faults.requests.clear()
        return StepOutput(deltas=deltas, stats=stats, incidents=[*incidents, *self._faults.take_incidents()])

    def _deltas(
        self, plan: SchedulerOutput, sampled: SamplerOutput, verdicts: Mapping[str, Verdict], ended: Sequence[Request]
    ) -> list[TokenDelta]:
        """One delta for each request with new tokens, and for each that ended in whatever way."""
        if sampled.prompt_logprobs:
            self._collect_prompt_logprobs(plan, sampled)
        deltas, only_ids = [], not (sampled.logprobs or self._prompt_logprobs)
        for part in plan.scheduled:
            request = part.request
            verdict = verdicts.get(request.request_id)
            if verdict is None or not (verdict.token_ids or verdict.finish_reason):
                continue
            ids = verdict.token_ids
            if only_ids and verdict.finish_reason is None and len(request.output_token_ids) > len(ids):
                deltas.append(TokenDelta(request_id=request.request_id, token_ids=list(ids)))  # neither first nor last
            else:
                deltas.append(self._delta(request, verdict, sampled))
        if not ended:
            return deltas
        told = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        return deltas + [self._ending(request) for request in ended if request.request_id not in told]

    def _delta(self, request: Request, verdict: Verdict, sampled: SamplerOutput) -> TokenDelta:
        key = request.request_id
        rows = sampled.logprobs.get(key)
        return TokenDelta(
            request_id=key,
            token_ids=list(verdict.token_ids),
            logprobs=list(rows[: len(verdict.token_ids)]) if rows else [],
            prompt_logprobs=self._prompt_logprobs.pop(key, []) if self._prompt_logprobs else [],
            finish_reason=verdict.finish_reason,
            stop_reason=verdict.stop_reason if verdict.finish_reason else None,
            error=self._error_of(request, sampled) if verdict.finish_reason is FinishReason.ERROR else None,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_time=request.first_scheduled_time,
        )

    def _ending(self, request: Request) -> TokenDelta:
        """The end of a request that no verdict announced: refused by the scheduler, or failed by a stage."""
        reason = request.finish_reason or FinishReason.ERROR
        error = self._error_of(request, NOTHING_SAMPLED) if reason is FinishReason.ERROR else None
        return TokenDelta(request_id=request.request_id, finish_reason=reason, error=error)

    def _error_of(self, request: Request, sampled: SamplerOutput) -> str:
        key = request.request_id
        known = self._faults.requests.get(key) or sampled.errors.get(key) or request.stop_reason
        return told(known or f"{self._faults.names.of('completion').who}: it ended the request with an error")

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
        self._execution.forget([request.request_id for request in requests])
        for request in requests:
            if request.is_finished:
                self._prompt_logprobs.pop(request.request_id, None)

    def _read(self, gauge: Callable[[], int]) -> int:
        """Of the cache; what it does wrong here costs nobody anything."""
        try:
            return gauge()
        except StageError as error:
            self._faults.note(error.group, error.reason, error)
            return 0

    def _gauges(self) -> StepStats:
        running, waiting, swapped = self._scheduler.counts()
        swapped_blocks, cache = self._execution.take_swapped(), self._pipeline.cache
        return StepStats(
            step=self._last_step,
            running=running,
            waiting=waiting,
            swapped=swapped,
            num_swapped_out_blocks=swapped_blocks.out,
            num_swapped_in_blocks=swapped_blocks.back,
            kv_blocks_free=self._read(lambda: cache.num_free_blocks),
            kv_blocks_total=cache.num_blocks,
            swap_blocks_free=self._read(lambda: cache.num_free_swap_blocks),
            swap_blocks_total=cache.num_swap_blocks,
        )

    def _stats(self, plan: SchedulerOutput, batch: ModelBatch, result: StepResult, times: Times) -> StepStats:
        self._last_step = plan.step
        self._step_ended = times.ended if self.has_work() else None
        forward_s = result.forward_s or times.executed - times.built - result.sample_s
        num_queried, num_cached = _prefix_tokens(plan)
        return structs.replace(
            self._gauges(),
            num_requests=len(plan.scheduled),
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_preemptions=len(plan.preempted),
            num_queried_tokens=num_queried,
            num_cached_tokens=num_cached,
            between_s=times.start - times.previous,
            schedule_s=times.scheduled - times.start,
            build_s=times.built - times.scheduled,
            forward_s=forward_s,
            sample_s=result.sample_s,
            output_s=times.ended - times.executed,
        )


def _prefix_tokens(plan: SchedulerOutput) -> tuple[int, int]:
    """Prompt tokens of the requests that start with this plan and look into the prefix cache; of these, found there."""
    num_queried = num_cached = 0
    for part in plan.scheduled:
        request = part.request
        if part.start == request.num_cached_tokens and not request.num_preemptions:
            num_queried += request.num_prompt_tokens if request.params.prompt_logprobs is None else 0
            num_cached += part.start
    return num_queried, num_cached
