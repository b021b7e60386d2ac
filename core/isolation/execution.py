"""Running a step where the model lives: what comes back is checked, and what fails is found request by request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.batch import ModelBatch, SamplerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from core.cache.kv_cache import KVCopy
from core.errors import Terminated, described, shown, told
from core.grammar.progress import MAX_FORCED
from core.isolation.faults import Faults, SpoiltKVError, StageError, SwapError, is_told
from core.model.interface import Executor, StepResult
from core.outputs import PluginIncident
from core.wire import is_sendable

log = logging.getLogger("nonet.engine")

MAX_LOST_STEPS = 3


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """KV blocks that were copied to host memory, and back to the device."""

    out: int = 0
    back: int = 0


class Execution:
    """An executor whose steps never raise for one request's sake."""

    def __init__(self, executor: Executor, vocab_size: int, faults: Faults):
        self._executor = executor
        self._vocab_size = vocab_size
        self._faults = faults
        self._num_failed = 0  # steps of several requests
        self._lost_steps = 0  # in a row, in which every one of several requests failed
        self._swapped = SwappedBlocks()

    def run(
        self, plan: SchedulerOutput, batch: ModelBatch, build: Callable[[SchedulerOutput], ModelBatch]
    ) -> StepResult:
        """`build` makes the batch of a part of the plan. Raises SpoiltKVError, and what fails every request again and again."""
        try:
            result = self._run(plan, batch)
            self._lost_steps = 0
        except Terminated:
            raise
        except BaseException as error:  # a plugin may raise anything
            if len(plan.scheduled) > 1:
                self._tell_failed(plan, error)
            result = self._one_by_one(plan, error, build)
        return result

    def swap(self, copies: Sequence[KVCopy]) -> None:
        """Copies of KV between device and host memory, before the step's forward pass. Raises SwapError."""
        if not copies:
            return
        try:
            self._faults.call("executor", None, self._executor.swap, copies)
        except StageError as error:
            self._faults.num_swap_failures += 1
            raise SwapError(error.group, f"swap failed: {error.reason}") from error.__cause__
        sizes = {
            direction: sum(len(c.host_blocks) for c in copies if c.direction == direction)
            for direction in ("out", "in")
        }
        self._swapped = SwappedBlocks(out=sizes["out"], back=sizes["in"])

    def take_swapped(self) -> SwappedBlocks:
        """What has been copied since this was asked last."""
        swapped, self._swapped = self._swapped, SwappedBlocks()
        return swapped

    def forget(self, request_ids: Sequence[str]) -> None:
        try:
            self._faults.call("executor", None, self._executor.forget, request_ids)
        except StageError as error:
            self._faults.note("executor", f"forget failed: {error.reason}", error)

    def _run(self, plan: SchedulerOutput, batch: ModelBatch) -> StepResult:
        started = self._faults.clock()
        result = self._executor.submit(batch).result()
        if not isinstance(result, StepResult):
            raise StageError("executor", f"the step's result is {shown(result)}, which is no StepResult")
        sampled = self._checked(plan, result.sampled)
        incidents = self._incidents_of(result) if result.incidents else ()
        no_numbers = result.no_numbers and tuple(key for key in result.no_numbers if key in sampled.errors)
        result = StepResult(sampled, _seconds(result.forward_s), _seconds(result.sample_s), incidents, no_numbers)
        took = self._faults.clock() - started
        if took > self._faults.block_timeout:
            self._blocked(took, result)
        return result

    def _incidents_of(self, result: StepResult) -> tuple[PluginIncident, ...]:
        sound = tuple(i for i in result.incidents if type(i) is PluginIncident and is_sendable(i))
        if len(sound) != len(result.incidents):
            self._faults.note("executor", "it told of an incident that is no PluginIncident, or cannot be sent")
        return sound

    def _tell_failed(self, plan: SchedulerOutput, error: BaseException) -> None:
        """Also told where the step succeeds request by request: then nobody is counted."""
        self._num_failed += 1
        if is_told(self._num_failed):
            text = "step %d failed, the %d. so far; its %d requests are run one by one: %s"
            numbers = (plan.step, self._num_failed, len(plan.scheduled))
            log.error(text, *numbers, described(error), exc_info=error)

    def _one_by_one(
        self, plan: SchedulerOutput, error: BaseException, build: Callable[[SchedulerOutput], ModelBatch]
    ) -> StepResult:
        """Find who broke the step. KV writes are idempotent, so running a request's share again is safe.

        When nobody's share runs, for `MAX_LOST_STEPS` steps in a row, it is not a request that is broken but the device
        or a plugin: then this raises, the engine process ends and is started again.
        """
        results: list[StepResult] = []
        num_raised = 0  # others came back, be it with an error: a logits processor's failure is no lost step
        for part in plan.scheduled:
            try:
                if len(plan.scheduled) == 1:
                    raise error
                alone = SchedulerOutput(plan.step, (part,))
                results.append(self._run(alone, build(alone)))
            except Terminated:
                raise
            except BaseException as its_error:  # this is the one
                num_raised += 1
                results.append(self._failed(part, its_error))
        if len(results) > 1:
            self._count_lost(num_raised == len(results), error)
        if isinstance(error, SpoiltKVError):
            raise error
        return _merged(results)

    def _failed(self, part: ScheduledRequest, error: BaseException) -> StepResult:
        key = part.request.request_id
        return StepResult(SamplerOutput({}, errors={key: self._faults.fail_by(error, "executor", key)}))

    def _count_lost(self, lost: bool, error: BaseException) -> None:
        self._lost_steps = self._lost_steps + 1 if lost else 0
        if self._lost_steps >= MAX_LOST_STEPS:
            raise RuntimeError(
                f"{self._lost_steps} steps in a row failed for each of their requests: {error}"
            ) from error

    def _blocked(self, took: float, result: StepResult) -> None:
        """An executor in this process says itself who held the step up."""
        forward, sample = result.forward_s, result.sample_s
        slowest = "executor" if took > 2 * (forward + sample) else "model" if forward >= sample else "sampler"
        self._faults.watch(slowest, 0.0 if result.incidents else took)

    def _checked(self, plan: SchedulerOutput, sampled: SamplerOutput) -> SamplerOutput:
        """What the sampler says of each request of the plan, or an error in its place. Costs a look per request."""
        if not isinstance(sampled, SamplerOutput) or not all(isinstance(part, Mapping) for part in sampled.parts):
            raise StageError("sampler", f"sample returned {shown(sampled)}, which is no SamplerOutput of mappings")
        flaws: dict[str, str] = {}
        token_ids, num_found = sampled.token_ids, 0
        for part in plan.scheduled:
            ids = token_ids.get(part.request.request_id)
            num_found += ids is not None
            flaw = self._flaw(part, ids) if ids is not None else _flaw_without_ids(part, sampled)
            if flaw:
                flaws[part.request.request_id] = flaw
        if sampled.logprobs or sampled.prompt_logprobs:
            flaws = {**_flaws_of_logprobs(sampled, self._vocab_size), **flaws}
        if flaws or sampled.errors or num_found != len(sampled.token_ids):
            return self._without(plan, sampled, flaws)
        return sampled

    def _flaw(self, part: ScheduledRequest, ids: object) -> str:
        """Token ids are Python ints: numpy's do not cross to the front."""
        if not part.samples:
            return f"it returned {shown(ids)} for a part of a prompt, of which nothing is sampled"
        most = 1 + part.num_drafts + (MAX_FORCED if part.request.params.grammar is not None else 0)
        if type(ids) is tuple and 1 <= len(ids) <= most:
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                    break
            else:
                return ""
        return f"it returned {shown(ids)}, which are no token ids of the model (a tuple of 1 to {most} ints)"

    def _without(self, plan: SchedulerOutput, sampled: SamplerOutput, flaws: Mapping[str, str]) -> SamplerOutput:
        """With an error and nothing else for requests that failed, and nothing of requests that are not in the plan."""
        planned = {part.request.request_id for part in plan.scheduled}
        if not sampled.token_ids.keys() <= planned:
            strangers = [key for key in sampled.token_ids if key not in planned]
            self._faults.note("sampler", f"it returned ids for {shown(strangers)}")
        names = self._faults.names
        sampler, executor = names.of("sampler"), names.of("executor")
        errors = {key: names.led(told(text), sampler) for key, text in sampled.errors.items() if key in planned}
        for key, flaw in flaws.items():
            if key not in planned:
                self._faults.note("sampler", f"{flaw}, for {shown(key)}, which is not in the step")
                continue
            errors[key] = self._faults.fail("sampler", f"{flaw} (run by {executor.who})", key)
        good = planned - errors.keys()
        return SamplerOutput(
            {key: ids for key, ids in sampled.token_ids.items() if key in good},
            {key: rows for key, rows in sampled.logprobs.items() if key in good},
            {key: rows for key, rows in sampled.prompt_logprobs.items() if key in good},
            errors,
        )


def _flaw_without_ids(part: ScheduledRequest, sampled: SamplerOutput) -> str:
    if not part.samples or part.request.request_id in sampled.errors:
        return ""
    return "it returned neither token ids nor an error for this request"


def _flaws_of_logprobs(sampled: SamplerOutput, vocab_size: int) -> dict[str, str]:
    """By request id. Log-probabilities are finite: JSON has no other numbers."""
    flaws: dict[str, str] = {}
    for key, rows in (*sampled.logprobs.items(), *sampled.prompt_logprobs.items()):
        if not isinstance(rows, tuple) or not all(_is_sound(row, vocab_size) for row in rows):
            flaws[key] = (
                f"it returned log-probabilities {shown(rows)}, which are not of the model's ids, or no finite numbers"
            )
    for key, rows in sampled.logprobs.items():
        if key not in flaws and len(rows) != len(sampled.token_ids.get(key, ())):
            flaws[key] = f"it returned {len(rows)} log-probabilities for {len(sampled.token_ids.get(key, ()))} tokens"
    return flaws


def _is_sound(row: object, vocab_size: int) -> bool:
    """Python's own ints and floats: numpy's and torch's numbers do not cross to the front."""
    if type(row) is not TokenLogprobs or type(row.top) not in (list, tuple):
        return False
    if type(row.rank) is not int or not 0 <= row.rank <= vocab_size:
        return False
    return all(
        type(pair) is tuple
        and len(pair) == 2
        and type(pair[0]) is int
        and 0 <= pair[0] < vocab_size
        and type(pair[1]) is float
        and math.isfinite(pair[1])
        for pair in ((row.token_id, row.logprob), *row.top)
    )


def _seconds(value: object) -> float:
    return value if type(value) is float and math.isfinite(value) else 0.0


def _merged(results: Sequence[StepResult]) -> StepResult:
    outputs = [result.sampled for result in results]
    sampled = SamplerOutput(
        token_ids={k: v for o in outputs for k, v in o.token_ids.items()},
        logprobs={k: v for o in outputs for k, v in o.logprobs.items()},
        prompt_logprobs={k: v for o in outputs for k, v in o.prompt_logprobs.items()},
        errors={k: v for o in outputs for k, v in o.errors.items()},
    )
    incidents = tuple(incident for result in results for incident in result.incidents)
    return StepResult(sampled, incidents=incidents, no_numbers=tuple(key for r in results for key in r.no_numbers))
