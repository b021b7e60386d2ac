"""What stands around the plugins of stages 5, 6 and 9: a request that one of them fails ends alone, with an error that names it.

Made at assembly. They look nothing up in a step, and ask request by request only after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, cast

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.errors import Terminated, shown
from core.isolation.faults import Faults, StageError
from core.isolation.front import is_encodable
from core.request import FinishReason, Request
from core.stages.completion import Completion
from core.stages.decode import Decode
from core.stages.prefill import Prefill, StepWatcher
from core.stages.step_cost import StepTime, attended

CHANGED = "it changed a request, which is not its to change"
PAST_THE_END = "judge did not end the request at max_tokens, or at the end of the context"


NOT_THEIRS = ("params", "prompt_token_ids", "output_token_ids", "status", "num_computed_tokens")
"""Fields of a request that stages 5, 6 and 9 may not set, and that would lead others astray; what lists hold is read only.
Each costs a microsecond at 32 requests. `core.isolation.scheduler` looks at what goes to the front.
"""
_read = attrgetter(*NOT_THEIRS)


class Before:
    """What a call may not change, as it was."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests
        self._values = list(map(_read, requests))

    def restore(self) -> list[str]:
        """Puts back what was changed. Returns the ids of those requests."""
        if self._is_same():
            return []
        changed = []
        for request, values in zip(self._requests, self._values, strict=True):
            now = [getattr(request, name, None) for name in NOT_THEIRS]
            if any(one is not other for one, other in zip(now, values, strict=True)):
                for name, value in zip(NOT_THEIRS, values, strict=True):
                    setattr(request, name, value)
                changed.append(request.request_id)
        return changed

    def _is_same(self) -> bool:
        try:
            now = map(_read, self._requests)
            return all(map(is_, chain.from_iterable(now), chain.from_iterable(self._values)))
        except Terminated:
            raise
        except BaseException:  # what stands there now can be anything
            return False


class GuardedPrefill:
    """A `Prefill` that never raises: a request that it fails gets no tokens in this step, and is ended after it."""

    def __init__(self, prefill: Prefill, faults: Faults):
        self._prefill = prefill
        self._faults = faults
        self._watches = callable(getattr(type(prefill), "step_finished", None))  # since API 1.2
        self.num_zeros = 0  # times that it left a request for later

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        before, key, cause = Before((request,)), request.request_id, None
        try:
            asked = self._faults.call("prefill", key, self._prefill.num_tokens, request, remaining, token_budget)
        except StageError as error:
            asked, reason, cause = 0, error.reason, error
        else:
            reason = _flaw_of_count(asked, min(remaining, token_budget))
        if before.restore():
            reason = reason or CHANGED
        if reason:
            self._faults.fail("prefill", reason, key, cause)
            return 0
        self.num_zeros += not asked
        return asked

    def step_finished(self, plan: SchedulerOutput, seconds: float) -> None:
        """Tells it of a step, if it wants to know. What it does wrong then fails no request."""
        if not self._watches:
            return
        try:
            self._faults.call("prefill", None, cast(StepWatcher, self._prefill).step_finished, step_time(plan, seconds))
        except StageError as error:
            self._faults.note("prefill", error.reason, error)


def step_time(plan: SchedulerOutput, seconds: float) -> StepTime:
    """A part is a decode where it holds one token past the prompt, and drafts. All else is prefill: also output that a
    preempted request computes again."""
    chunks = [
        (part.start, part.num_tokens)
        for part in plan.scheduled
        if part.num_tokens - part.num_drafts != 1 or part.start < len(part.request.prompt_token_ids)
    ]
    num_prefill_tokens = sum(num_tokens for _, num_tokens in chunks)
    num_attended = sum(attended(start, num_tokens) for start, num_tokens in chunks)
    return StepTime(num_prefill_tokens, plan.num_scheduled_tokens - num_prefill_tokens, seconds, num_attended)


def _flaw_of_count(count: object, most: int) -> str:
    if type(count) is not int:  # numpy's integers and booleans included
        return f"num_tokens returned {shown(count)}, which is no int"
    return "" if 0 <= count <= most else f"num_tokens returned {count}; it may be 0 to {most}"


class GuardedDecode:
    """A `Decode` that never raises: a request that it fails goes without drafts in this step, and is ended after it."""

    def __init__(self, decode: Decode, faults: Faults, vocab_size: int):
        self._decode = decode
        self._faults = faults
        self._vocab_size = vocab_size
        self.proposes = vars(type(decode)).get("proposes") is not False

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        before, cause = Before(requests), None
        try:
            drafts = self._faults.call("decode", None, self._decode.propose, tuple(requests))
            reason = "" if isinstance(drafts, Mapping) else f"propose returned {shown(drafts)}, which is no mapping"
            if not reason and type(drafts) is not dict:
                drafts = self._faults.call("decode", None, dict, drafts)
        except StageError as error:
            drafts, reason, cause = {}, error.reason, error
        changed = before.restore()
        if reason and len(requests) > 1:
            return self._one_by_one(requests)
        for key in [request.request_id for request in requests] if reason else changed:
            self._faults.fail("decode", reason or CHANGED, key, cause)
        return self._checked(requests, drafts) if drafts and not reason else {}

    def _one_by_one(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        """Whom it fails. A failure that does not come again is nobody's: no drafts in this step."""
        num_failed = len(self._faults.requests)
        drafts = {key: ids for request in requests for key, ids in self.propose((request,)).items()}
        if len(self._faults.requests) == num_failed:
            self._faults.note("decode", "propose failed for several requests at once, and for none of them alone")
        return drafts

    def _checked(self, requests: Sequence[Request], drafts: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        checked: dict[str, tuple[int, ...]] = {}
        for request in requests:
            ids = drafts.get(request.request_id, ())
            if type(ids) in (tuple, list) and all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
                checked[request.request_id] = tuple(ids)
            else:
                self._faults.fail("decode", f"drafts {shown(ids)} are no token ids of the model", request.request_id)
        return checked


class GuardedCompletion:
    """A `Completion` that never raises: a request that it fails gets FinishReason.ERROR. No request of the plan is left out."""

    def __init__(self, completion: Completion, faults: Faults, max_model_len: int):
        self._completion = completion
        self._faults = faults
        self._max_model_len = max_model_len

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
        before = Before([part.request for part in output.scheduled])
        try:
            read_only = SamplerOutput(*map(MappingProxyType, sampled.parts))
            found = self._faults.call("completion", None, self._completion.judge, output, read_only)
            fault = _flaw_of_verdicts(found)
            if fault is None and type(found) is not dict:
                found = self._faults.call("completion", None, dict, found)
        except StageError as error:
            fault = error
        changed = before.restore()
        if fault is not None and len(output.scheduled) > 1:
            return self._one_by_one(output, sampled)
        verdicts: dict[str, Verdict] = {}
        token_ids = sampled.token_ids
        for part in output.scheduled:
            key = part.request.request_id
            verdict, ids = None if fault else found.get(key), token_ids.get(key, ())
            goes_on = type(verdict) is Verdict and verdict.token_ids is ids and ids and verdict.finish_reason is None
            if not goes_on or part.num_drafts:  # a single id is within the limits, see `GuardedScheduler`
                verdict = self._examined(part.request, verdict, ids, sampled, fault)
            if verdict is not None:
                verdicts[key] = verdict
        for key in changed:
            verdicts[key] = self._failed(key, CHANGED)
        return verdicts

    def _one_by_one(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
        """Whom it fails. A judgement follows from the request and its tokens, so it may be asked for again."""
        num_failed = len(self._faults.requests)
        verdicts: dict[str, Verdict] = {}
        for part in output.scheduled:
            alone = SchedulerOutput(output.step, (part,))
            verdicts.update(self.judge(alone, _only(sampled, part.request.request_id)))
        if len(self._faults.requests) == num_failed:
            self._faults.note("completion", "judge failed for several requests at once, and for none of them alone")
        return verdicts

    def _examined(
        self, request: Request, verdict: object, ids: tuple[int, ...], sampled: SamplerOutput, fault: StageError | None
    ) -> Verdict | None:
        """What counts where the verdict is not simply to go on; None: nothing was sampled, and nothing is said."""
        key = request.request_id
        if key in sampled.errors:
            return Verdict((), FinishReason.ERROR)
        if fault is not None:
            return self._failed(key, fault.reason, fault)
        if verdict is None and not ids:
            return None
        flaw = _flaw_of_verdict(verdict, ids)
        if flaw or not isinstance(verdict, Verdict):
            return self._failed(key, flaw)
        kept = ids[: len(verdict.token_ids)]  # the sampled ids themselves: a bool equals an int, and is none
        room = min(request.params.max_tokens - request.num_output_tokens, self._max_model_len - request.num_tokens)
        if len(kept) > room:
            self._faults.fail("completion", PAST_THE_END, key)
            return Verdict(kept[: max(room, 0)], FinishReason.ERROR)
        return Verdict(kept, verdict.finish_reason, verdict.stop_reason)

    def _failed(self, key: str, reason: str, cause: StageError | None = None) -> Verdict:
        self._faults.fail("completion", reason, key, cause)
        return Verdict((), FinishReason.ERROR)


def _only(sampled: SamplerOutput, key: str) -> SamplerOutput:
    return SamplerOutput(*({key: part[key]} if key in part else {} for part in sampled.parts))


def _flaw_of_verdicts(verdicts: object) -> StageError | None:
    if isinstance(verdicts, Mapping):
        return None
    return StageError("completion", f"judge returned {shown(verdicts)}, which is no mapping")


def _flaw_of_verdict(verdict: object, ids: tuple[int, ...]) -> str:
    if verdict is None:
        return "judge left the request out"
    if type(verdict) is not Verdict:
        return f"judge returned {shown(verdict)} for the request, which is no Verdict"
    kept: object = verdict.token_ids
    finish_reason: object = verdict.finish_reason
    if not _is_head(kept, ids):
        return f"judge kept {shown(kept)} of the sampled ids {shown(ids)}; it may only cut them"
    if not isinstance(finish_reason, FinishReason | None) or not _can_be_sent(verdict.stop_reason):
        return f"judge gave finish_reason {shown(finish_reason)} and stop_reason {shown(verdict.stop_reason)}"
    return "" if kept or finish_reason or not ids else "judge kept no token and did not end the request"


def _is_head(kept: object, ids: tuple[int, ...]) -> bool:
    try:
        return type(kept) is tuple and kept == ids[: len(kept)]
    except Terminated:
        raise
    except BaseException:  # what it holds may be anything
        return False


def _can_be_sent(stop_reason: object) -> bool:
    if type(stop_reason) is int:
        return -(1 << 63) <= stop_reason < 1 << 63
    return stop_reason is None or (type(stop_reason) is str and is_encodable(stop_reason))
