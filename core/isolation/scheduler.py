"""The scheduler as the engine sees it: each plan and each answer is checked against the engine's own table of requests.

A `StageError` from here means that the scheduler's books, or the cache's, can no longer be trusted. The table can: from it
the engine makes new ones (`core.isolation.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NoReturn, ParamSpec, TypeVar

from core.batch import ScheduledRequest, SchedulerOutput, Verdict
from core.errors import Terminated, described, shown
from core.isolation.cache import NO_BLOCKS, GuardedCache, Holding
from core.isolation.faults import Faults, StageError
from core.isolation.stages import CHANGED, PAST_THE_END
from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus, SamplingParams
from core.scheduling.expiry import Expiry
from core.stages.scheduler import Counts, Scheduler, SchedulerSettings

NO_NUMBERS = "it put something else than numbers where counts and times belong"
MAX_STEP = 1 << 63  # what can be sent
MAX_COUNT = 1 << 31  # tokens of a request, or times that it was preempted
_PARTS = frozenset({ScheduledRequest})
RUNNING = RequestStatus.RUNNING  # an enum's attribute costs as much as a call

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Live:
    """A request in flight. `request` is what plugins see; the rest is the engine's alone."""

    request: Request
    original: Request  # as it came
    output_token_ids: list[int]  # as verdicts kept them
    num_tokens: int  # prompt and output
    most: int  # of these, when it must have ended
    params: SamplingParams  # of `request`, and its two lists: the very objects
    prompt: list[int]
    output: list[int]
    planned: int = 0  # number of the last plan that it was in
    holding: Holding | None = None  # as of that plan

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> Live:
        params, prompt, output = request.params, request.prompt_token_ids, request.output_token_ids
        most = min(len(prompt) + params.max_tokens, max_model_len)
        return cls(request, request.afresh(), list(output), len(prompt) + len(output), most, params, prompt, output)

    def again(self) -> Request:
        """How it goes on with new books: preempted, its output kept and the rest to be computed again."""
        request, before = self.original.afresh(self.output_token_ids), self.request
        if type(before.first_scheduled_time) is float:
            request.first_scheduled_time = before.first_scheduled_time
            request.num_preemptions = 1 + (before.num_preemptions if type(before.num_preemptions) is int else 0)
        return request


class GuardedScheduler:
    """A `Scheduler`. `live` has every request between `add` and its end, in order of `add`."""

    def __init__(
        self, scheduler: Scheduler, cache: GuardedCache, limits: SchedulerSettings, max_model_len: int, faults: Faults
    ):
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._cache = cache
        self._limits = limits
        self._faults = faults
        self._num_plans = 0
        self._planned: list[Live] = []  # by the plan in hand
        self._expiry = Expiry(self._find)
        self.live: dict[str, Live] = {}
        self._counts: Counts | None = None  # after `update`, until something changes

    def add(self, request: Request) -> None:
        if request.request_id in self.live:
            return  # a message that came twice
        self._counts, request.block_table, request.group_tables = None, NO_BLOCKS, ()
        self.live[request.request_id] = Live.of(request, self._max_model_len)
        self._expiry.add(request)
        self._call(request.request_id, self._scheduler.add, request)

    def schedule(self) -> SchedulerOutput:
        plan = self._call(None, self._scheduler.schedule)
        self._num_plans, self._counts = self._num_plans + 1, None
        try:
            plan = _plain(plan)
            self._check_plan(plan)
        except (StageError, Terminated):
            raise
        except BaseException as error:  # it has not even the fields of a plan
            raise StageError("scheduler", f"schedule returned no plan: {described(error)}") from error
        self._check_ended(plan.refused)
        self._remove(plan.refused)
        self._cache.slide_all(plan.scheduled)
        return self._without_expired(plan) if self._expiry else plan

    def _without_expired(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Deadlines hold also with a scheduler that knows nothing of them (plugin API 1.1). Ours end what is late before they
        plan, so that it takes nobody's room: with them nothing is left to do here."""
        late = [
            request.request_id
            for request in self._expiry.pop_due(self._faults.clock())
            if self.live[request.request_id].planned != self._num_plans
        ]
        if not late:
            return plan
        return replace(plan, refused=(*plan.refused, *self.finish(late, FinishReason.EXPIRED)))

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        """What the verdicts kept is in the table afterwards in any case, also when this raises."""
        self._cache.verdicts = verdicts
        try:
            ended = self._call(None, self._scheduler.update, output, MappingProxyType(verdicts))
        except StageError:
            self._keep(verdicts, [])
            raise
        to_end: list[str] = []
        stray = self._keep(verdicts, to_end)
        if stray is not None:
            self._fault("update did not append exactly the ids that the verdict kept", stray)
        self._check_ended(ended, to_end)
        self._counts = None
        self._counts, num_live = self.counts(), len(self.live) - len(ended)
        if sum(self._counts) != num_live:
            self._fault(f"it has {self._counts}, and {num_live} requests are in flight")
        return self._remove(ended)

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        self._counts = None
        self._cache.verdicts = {key: Verdict((), reason) for key in request_ids}
        ended = self._call(None, self._scheduler.finish, request_ids, reason)
        self._check_ended(ended, request_ids)
        return self._remove(ended)

    def counts(self) -> Counts:
        """The table's own count where the scheduler gives none."""
        if self._counts is not None:
            return self._counts
        try:
            counts = Counts(*self._call(None, self._scheduler.counts))  # of two numbers in API 1.1
            if all(type(count) is int and 0 <= count <= len(self.live) for count in counts):
                return counts
            self._faults.note("scheduler", f"counts returned {shown(tuple(counts))}")
        except Terminated:
            raise
        except BaseException as error:  # what it returned may be anything
            self._faults.note("scheduler", f"counts failed: {described(error)}", error)
        running = sum(live.request.status is RequestStatus.RUNNING for live in self.live.values())
        return Counts(running, len(self.live) - running)

    def drop(self, request_id: str, reason: FinishReason) -> Request:
        """End a request without the scheduler, whose books are given up."""
        request = self.live.pop(request_id).request
        request.status, request.finish_reason = STATUS_OF_REASON[reason], reason
        return request

    def _keep(self, verdicts: Mapping[str, Verdict], to_end: list[str]) -> str | None:
        """Into the table with the ids of the plan in hand; into `to_end` with requests that verdicts end. Returns a request
        that has other ids now, if any."""
        stray = None
        for live in self._planned:
            request, kept = live.request, live.output_token_ids
            verdict = verdicts.get(request.request_id)
            if verdict is not None:
                kept += verdict.token_ids
                live.num_tokens += len(verdict.token_ids)
                if verdict.finish_reason is not None:
                    to_end.append(request.request_id)
                elif live.num_tokens >= live.most:
                    self._faults.fail("completion", PAST_THE_END, request.request_id)
            num_cached, num_preemptions = request.num_cached_tokens, request.num_preemptions
            if (
                type(num_cached) is not int
                or type(num_preemptions) is not int
                or type(request.first_scheduled_time) is not float
                or num_cached > live.num_tokens
            ):
                self._check_numbers(request)
            ids = request.output_token_ids
            if ids is not live.output or len(ids) != len(kept) or (kept and ids[-1] != kept[-1]):
                stray = request.request_id
        return stray

    def _check_numbers(self, request: Request) -> None:
        if _tells_numbers(request):
            return
        self._faults.fail("scheduler", NO_NUMBERS, request.request_id)  # it ends after the step
        request.num_cached_tokens = request.num_preemptions = 0
        request.first_scheduled_time = None

    def _check_plan(self, plan: SchedulerOutput) -> None:
        if type(plan.step) is not int or not 0 <= plan.step < MAX_STEP:
            self._fault(f"its plan has the step number {shown(plan.step)}")
        self._planned, num_tokens, size = [], 0, self._cache.block_size
        table, holdings = self.live, self._cache.holdings
        for part in plan.scheduled:
            key = part.request.request_id
            flaw = self._flaw(part, table.get(key), holdings.get(key), size)
            num_tokens += 0 if flaw else part.num_tokens
            if num_tokens > self._limits.max_num_scheduled_tokens:
                flaw = f"its plan exceeds {self._limits.max_num_scheduled_tokens} tokens"
            if flaw:
                self._fault(flaw, key)
        if len(plan.scheduled) > self._limits.max_num_running_reqs:
            first = plan.scheduled[self._limits.max_num_running_reqs]
            self._fault(f"its plan has {len(plan.scheduled)} requests", first.request.request_id)
        for request in plan.preempted:
            if not self._is_live(request):
                self._fault("it preempted a request that is not in flight")

    def _flaw(self, part: ScheduledRequest, live: Live | None, holding: Holding | None, size: int) -> str:
        """Why a part cannot be run, or ""; then it is marked as planned. `size`: tokens of a block."""
        request, start, num_tokens, num_drafts = part.request, part.start, part.num_tokens, part.num_drafts
        if live is None or live.request is not request:
            return "it planned a request that is not in flight"
        if (
            request.params is not live.params
            or request.prompt_token_ids is not live.prompt
            or request.output_token_ids is not live.output
        ):
            request.params, request.prompt_token_ids, request.output_token_ids = live.params, live.prompt, live.output
            self._faults.fail("scheduler", CHANGED, request.request_id)  # it ends after the step
        if live.planned == self._num_plans:
            return "it planned a request twice in a step"
        if type(start) is not int or type(num_tokens) is not int or type(num_drafts) is not int or num_tokens < 1:
            return f"it planned {shown(num_tokens)} tokens from {shown(start)}, {shown(num_drafts)} drafts among them"
        end = start + num_tokens
        known = end - num_drafts
        if known > live.num_tokens or part.samples is not (known == live.num_tokens):
            return (
                f"it planned positions {start} to {end} of {live.num_tokens} and {num_drafts} drafts ({part.samples=})"
            )
        if num_drafts and not 0 < num_drafts <= min(num_tokens - 1, len(request.draft_token_ids)):
            return f"it planned {num_drafts} drafts of {len(request.draft_token_ids)}"
        if holding is None or end > len(holding.table) * size:
            return f"it planned up to position {end}, which has no KV block"
        if not holding.num_found * size <= start <= holding.num_planned:
            return f"it planned from position {start}; KV is written up to {holding.num_planned}"
        if request.block_table is not holding.table:
            return "it put another block table in place of the cache's"
        if request.num_computed_tokens != end or request.status is not RUNNING:
            return f"num_computed_tokens is {shown(request.num_computed_tokens)}, status {request.status!r}, at {end}"
        if live.holding is not holding:  # the first part after it was admitted
            if not _tells_numbers(request):
                return NO_NUMBERS
            live.holding = holding
        live.planned = self._num_plans
        holding.num_planned = end
        self._planned.append(live)
        return ""

    def _check_ended(self, ended: Sequence[Request], expected: Sequence[str] = ()) -> None:
        """All of `expected` must have ended, and whatever else has must be in flight."""
        if type(ended) not in (list, tuple):
            self._fault(f"what it says has ended is {shown(ended)}, which is no list of requests")
        if not ended and not expected:
            return
        try:
            keys = {request.request_id for request in ended if self._is_live(request) and request.is_finished}
            for request in ended:
                if not isinstance(request.finish_reason, FinishReason):
                    self._fault(
                        f"it ended a request with the reason {shown(request.finish_reason)}", request.request_id
                    )
            if len(keys) != len(ended):
                self._fault(
                    f"it says that {len(ended)} requests have ended, and {len(keys)} of them have, and were in flight"
                )
        except (StageError, Terminated):
            raise
        except BaseException as error:
            raise StageError(
                "scheduler", f"what it says has ended is no list of requests: {described(error)}"
            ) from error
        for key in expected:
            if key not in keys:
                self._fault("it did not end a request that is to end", key)

    def _remove(self, ended: Sequence[Request]) -> list[Request]:
        for request in ended:
            del self.live[request.request_id]
            if request.request_id in self._cache.holdings or request.request_id in self._cache.swapped:
                self._faults.note("scheduler", "it left blocks to a request that has ended")
                self._cache.free(request, discard=request.finish_reason is FinishReason.ERROR)
        return list(ended)

    def _find(self, request_id: str) -> Request | None:
        live = self.live.get(request_id)
        return None if live is None else live.request

    def _is_live(self, request: Request) -> bool:
        live = self.live.get(request.request_id)
        return live is not None and live.request is request

    def _call(self, request_id: str | None, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._faults.call("scheduler", request_id, method, *args, **kwargs)

    def _fault(self, reason: str, request_id: str | None = None) -> NoReturn:
        raise StageError("scheduler", reason, request_id)


def _plain(plan: SchedulerOutput) -> SchedulerOutput:
    """Nothing in it changes any more, or answers otherwise the next time."""
    if type(plan) is not SchedulerOutput or {type(plan.scheduled), type(plan.preempted), type(plan.refused)} != {tuple}:
        plan = SchedulerOutput(plan.step, tuple(plan.scheduled), tuple(plan.preempted), tuple(plan.refused))
    if not _PARTS.issuperset(map(type, plan.scheduled)):
        raise StageError("scheduler", "its plan holds something else than ScheduledRequest")
    return plan


def _tells_numbers(request: Request) -> bool:
    """Whether what goes to the front as it stands can go there."""
    counts = (request.num_cached_tokens, request.num_preemptions)
    if not all(type(count) is int and 0 <= count < MAX_COUNT for count in counts):
        return False
    return type(request.first_scheduled_time) in (float, type(None))
