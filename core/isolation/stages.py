"""What stands around the plugins of stages 5, 6 and 9: a request that one of them fails ends alone, with an error that names it.

Made at assembly. They look nothing up in a step, and ask request by request only after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.isolation.faults import Faults, StageError, shown
from core.request import FinishReason, Request
from core.stages.completion import Completion
from core.stages.decode import Decode
from core.stages.prefill import Prefill

CHANGED = "it changed a request, which is not its to change"


class Before:
    """What a call may lead others astray by changing: cheap to read. Lists of a request need no look, they are read only."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests
        self._num_computed = [request.num_computed_tokens for request in requests]
        self._statuses = [request.status for request in requests]

    def restore(self) -> list[str]:
        """Puts back what was changed. Returns the ids of those requests."""
        requests = self._requests
        now = [request.num_computed_tokens for request in requests]
        if now == self._num_computed and [request.status for request in requests] == self._statuses:
            return []
        changed = []
        for request, num_computed, status in zip(requests, self._num_computed, self._statuses, strict=True):
            if request.num_computed_tokens != num_computed or request.status is not status:
                request.num_computed_tokens, request.status = num_computed, status
                changed.append(request.request_id)
        return changed


class GuardedPrefill:
    """A `Prefill` that never raises: a request that it fails gets no tokens in this step, and is ended after it."""

    def __init__(self, prefill: Prefill, faults: Faults):
        self._prefill = prefill
        self._faults = faults
        self.num_zeros = 0  # times that it left a request for later

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        before, key = Before((request,)), request.request_id
        try:
            asked = self._faults.call("prefill", key, self._prefill.num_tokens, request, remaining, token_budget)
        except StageError as error:
            asked, reason = 0, error.reason
        else:
            reason = _flaw_of_count(asked, min(remaining, token_budget))
        if before.restore():
            reason = reason or CHANGED
        if reason:
            self._faults.fail("prefill", reason, key)
            return 0
        self.num_zeros += not asked
        return asked


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

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        before = Before(requests)
        try:
            drafts = self._faults.call("decode", None, self._decode.propose, tuple(requests))
        except StageError as error:
            drafts, reason = {}, error.reason
        else:
            reason = "" if isinstance(drafts, Mapping) else f"propose returned {shown(drafts)}, which is no mapping"
        changed = before.restore()
        if reason and len(requests) > 1:
            return self._one_by_one(requests)
        for key in [request.request_id for request in requests] if reason else changed:
            self._faults.fail("decode", reason or CHANGED, key)
        return self._checked(requests, drafts) if drafts and not reason else {}

    def _one_by_one(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        """Whom it fails. A failure that does not come again is nobody's: no drafts in this step."""
        num_failed = len(self._faults.requests)
        drafts = {key: ids for request in requests for key, ids in self.propose((request,)).items()}
        if len(self._faults.requests) == num_failed:
            self._faults.note("decode", "propose failed for several requests at once, and for none of them alone")
        return drafts

    def _checked(self, requests: Sequence[Request], drafts: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
        checked: dict[str, tuple[int, ...]] = {}
        for request in requests:
            ids = drafts.get(request.request_id, ())
            if isinstance(ids, tuple | list) and all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
                checked[request.request_id] = tuple(ids)
            else:
                self._faults.fail("decode", f"drafts {shown(ids)} are no token ids of the model", request.request_id)
        return checked


class GuardedCompletion:
    """A `Completion` that never raises: a request that it fails gets FinishReason.ERROR. No request of the plan is left out."""

    def __init__(self, completion: Completion, faults: Faults):
        self._completion = completion
        self._faults = faults

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
        before = Before([part.request for part in output.scheduled])
        try:
            read_only = SamplerOutput(*map(MappingProxyType, sampled.parts))
            found = self._faults.call("completion", None, self._completion.judge, output, read_only)
        except StageError as error:
            found, reason = {}, error.reason
        else:
            reason = "" if isinstance(found, Mapping) else f"judge returned {shown(found)}, which is no mapping"
        changed = before.restore()
        if reason and len(output.scheduled) > 1:
            return self._one_by_one(output, sampled)
        verdicts: dict[str, Verdict] = {}
        token_ids = sampled.token_ids
        for part in output.scheduled:
            key = part.request.request_id
            verdict, ids = None if reason else found.get(key), token_ids.get(key, ())
            if not (type(verdict) is Verdict and verdict.token_ids is ids and ids and verdict.finish_reason is None):
                verdict = self._examined(key, verdict, ids, sampled, reason)
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
        self, key: str, verdict: object, ids: tuple[int, ...], sampled: SamplerOutput, reason: str
    ) -> Verdict | None:
        """What counts where the verdict is not simply to go on; None: nothing was sampled, and nothing is said."""
        if key in sampled.errors:
            return Verdict((), FinishReason.ERROR)
        if not reason and verdict is None and not ids:
            return None
        reason = reason or _flaw_of_verdict(verdict, ids)
        if reason or not isinstance(verdict, Verdict):
            return self._failed(key, reason)
        kept = ids[: len(verdict.token_ids)]  # the sampled ids themselves: a bool equals an int, and is none
        return Verdict(kept, verdict.finish_reason, verdict.stop_reason)

    def _failed(self, key: str, reason: str) -> Verdict:
        self._faults.fail("completion", reason, key)
        return Verdict((), FinishReason.ERROR)


def _only(sampled: SamplerOutput, key: str) -> SamplerOutput:
    return SamplerOutput(*({key: part[key]} if key in part else {} for part in sampled.parts))


def _flaw_of_verdict(verdict: object, ids: tuple[int, ...]) -> str:
    if verdict is None:
        return "judge left the request out"
    if not isinstance(verdict, Verdict):
        return f"judge returned {shown(verdict)} for the request, which is no Verdict"
    kept: object = verdict.token_ids
    finish_reason: object = verdict.finish_reason
    if not isinstance(kept, tuple) or kept != ids[: len(kept)]:
        return f"judge kept {shown(kept)} of the sampled ids {shown(ids)}; it may only cut them"
    if not isinstance(finish_reason, FinishReason | None) or not isinstance(verdict.stop_reason, int | str | None):
        return f"judge gave finish_reason {shown(finish_reason)} and stop_reason {shown(verdict.stop_reason)}"
    return "" if kept or finish_reason or not ids else "judge kept no token and did not end the request"
