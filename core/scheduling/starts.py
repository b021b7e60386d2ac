"""How waiting requests become running ones: prefix hits or KV from host memory, all blocks at once, and a first chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from core.request import Request, RequestStatus
from core.scheduling.blocks import BlockBudget
from core.scheduling.plan import Blocked, Plan, Trial
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.preempted_kv import PreemptedKV
from core.scheduling.queues import Queues
from core.stages.scheduler import SchedulerContext

MAX_PASSED = (
    16  # requests that are looked at in vain in a step; those that stage 5 holds back are not looked at again soon
)
NUM_RETRIES = 2  # of those held back, that are looked at again when a prompt is through or a request has ended
FORGET_STEPS = 1024  # after so many, stage 5 is asked again for all that it holds back, in case it has other rules


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of trying waiting requests: of the last one, and those that can never run."""

    last: Trial
    refused: Sequence[Request] = ()


class Starts:
    """A request is admitted when blocks for all its known tokens are free, and gets them at once.

    So a prompt in chunks never runs out half-way, a resumed one is not preempted for its own next chunk, and a request alone
    always fits.
    """

    def __init__(
        self,
        settings: QueueSettings,
        context: SchedulerContext,
        policy: Policy,
        queues: Queues,
        kv: PreemptedKV,
        plan_part: Callable[[Request, int, Plan], None],
    ):
        """`plan_part(request, num_tokens, plan)` gives a request that runs now its share of the step."""
        self._max_tokens = settings.max_num_scheduled_tokens
        self._max_running = settings.max_num_running_reqs
        self._cache = context.cache
        self._prefill = context.prefill
        self._clock = context.clock
        self._max_model_len = context.max_model_len
        self._policy = policy
        self._queues = queues
        self._blocks = BlockBudget(context.cache)
        self._kv = kv
        self._plan_part = plan_part
        self._blocked: Blocked | None = None
        self._held_back: set[str] = set()  # ids that stage 5 gave nothing of a whole step
        self._num_retries = 0  # of these, the first in line, that are asked for again
        self._forgot_step = 0

    def changed(self) -> None:
        """Blocks, slots or a place among the prompts may be free that were not."""
        self._blocked = None
        self._num_retries = NUM_RETRIES

    def ended(self, request: Request) -> None:
        self._held_back.discard(request.request_id)
        self.changed()

    def never_fits(self, request: Request) -> bool:
        impossible = not 0 < request.num_prompt_tokens <= self._max_model_len
        return impossible or self._blocks.num_needed(request.num_known_tokens) > self._cache.num_blocks

    def holds_back(self, request: Request) -> bool:
        """Whether stage 5 gave it nothing when it was asked last, of a whole step."""
        return request.request_id in self._held_back

    def first(self, order: Iterable[Request]) -> Request | None:
        """Of those that stage 5 does not hold back."""
        return next((request for request in order if not self._is_skipped(request)), None)

    def _is_skipped(self, request: Request) -> bool:
        if request.request_id not in self._held_back:
            return False
        if not self._num_retries:
            return True
        self._num_retries -= 1
        self._held_back.remove(request.request_id)
        return False

    def num_missing(self, request: Request, plan: Plan) -> int | None:
        """Blocks that lack for a waiting request to start in this step, found prefix and all; 0 or less when they are free.

        None: it gets no tokens in this step, whatever room there is.
        """
        if request.status is RequestStatus.SWAPPED:
            remaining = self._kv.num_to_compute(request)
        else:
            remaining = request.num_known_tokens - self._cache.lookup(request)
        missing = self._num_lacking(request)
        if request.status is not RequestStatus.SWAPPED:
            self._cache.free(request)
        if self._chunk(request, remaining, plan):
            return missing
        self._without_tokens(request, remaining)
        return None

    def admit(self, order: Iterable[Request], plan: Plan) -> Tried:
        """Start waiting requests in this order as far as there is room."""
        if plan.step >= self._forgot_step + FORGET_STEPS:
            self._forgot_step = plan.step
            self._held_back.clear()
        tried: dict[Trial, list[Request]] = {trial: [] for trial in Trial}
        trial = Trial.WAITS
        for request in order:
            if self._is_skipped(request):
                trial = Trial.PASSED
                continue
            if plan.token_budget <= plan.num_to_plan or len(self._queues.running) >= self._max_running:
                break
            trial = self._try(request, plan)
            tried[trial].append(request)
            num_passed = len(tried[Trial.WAITS]) + len(tried[Trial.PASSED])
            if (trial is Trial.WAITS and self._policy.head_of_line) or num_passed >= MAX_PASSED:
                break
        self._queues.settle(tried[Trial.STARTED])
        return Tried(trial, tried[Trial.REFUSED])

    def _try(self, request: Request, plan: Plan) -> Trial:
        if request.num_pending_tokens or request in plan.preempted:
            return Trial.WAITS  # its last id is still to come, or it has just given way
        if self.never_fits(request):
            return Trial.REFUSED
        if request.status is RequestStatus.SWAPPED:
            return self._resume(request, plan)
        if self._blocked and self._blocked.still(request, self._cache.num_free_blocks, len(self._queues.running)):
            return Trial.WAITS
        num_cached = self._cache.lookup(request)
        num_tokens = self._chunk(request, request.num_known_tokens - num_cached, plan)
        if not num_tokens or not self._allocate_all(request):
            self._cache.free(request)
            if num_tokens:
                self._blocked = Blocked(request, self._cache.num_free_blocks, len(self._queues.running))
                return Trial.WAITS
            return self._without_tokens(request, request.num_known_tokens - num_cached)
        self._enter(request, num_cached)
        self._plan_part(request, num_tokens, plan)
        return Trial.STARTED

    def _resume(self, request: Request, plan: Plan) -> Trial:
        """A swapped request: nothing is copied before all its blocks are sure."""
        remaining = self._kv.num_to_compute(request)
        num_tokens = self._chunk(request, remaining, plan)
        if not num_tokens:
            return self._without_tokens(request, remaining)
        if self._num_lacking(request) > 0:
            return Trial.WAITS
        num_restored = self._kv.take_back(request)
        if num_restored is None:
            return Trial.WAITS
        self._cache.allocate(request, self._num_reserved(request))
        self._enter(request, num_restored)
        self._plan_part(request, min(num_tokens, request.num_known_tokens - num_restored), plan)
        return Trial.STARTED

    def _chunk(self, request: Request, remaining: int, plan: Plan) -> int:
        """Running requests that have not had their turn keep a token each."""
        budget = plan.token_budget - plan.num_to_plan
        if budget < 1:
            return 0
        if remaining == 1 and request.num_output_tokens:
            return 1  # a resumed decode, no matter of stage 5
        return self._prefill.num_tokens(request, remaining, budget)

    def _without_tokens(self, request: Request, remaining: int) -> Trial:
        """No tokens: for want of budget, or would a whole step's not do either?"""
        if self._prefill.num_tokens(request, remaining, self._max_tokens):
            return Trial.WAITS
        self._held_back.add(request.request_id)
        return Trial.PASSED

    def _allocate_all(self, request: Request) -> bool:
        return self._num_lacking(request) <= 0 and self._cache.allocate(request, self._num_reserved(request))

    def _num_lacking(self, request: Request) -> int:
        return self._blocks.num_missing(request, self._num_reserved(request)) + self.num_spare(request)

    def _num_reserved(self, request: Request) -> int:
        """Positions whose blocks it gets now: all that are known, and what the policy adds where the pool can have it."""
        most = min(self._max_model_len, self._blocks.max_positions)
        return max(request.num_known_tokens, min(self._policy.num_reserved(request), most))

    def num_spare(self, request: Request) -> int:
        """Blocks that stay free when a preempted request resumes: one to grow for it and for each running one.

        So it is not preempted again at once, and the number of preemptions of a request stays small.
        """
        return len(self._queues.running) + 1 if self._queues.running and request.num_preemptions else 0

    def _enter(self, request: Request, num_cached: int) -> None:
        entry = self._queues.entry(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            entry.num_cached_first = num_cached
        self._queues.start(request)
        request.num_computed_tokens = num_cached
        request.num_cached_tokens = min(num_cached, entry.num_cached_first)  # own blocks found again are no saving
