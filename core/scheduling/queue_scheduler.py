"""The mechanism that scheduling policies share: queues, budgets, prefix hits, blocks, preemption by recompute, endings.

A policy says who comes first and who gives way; everything else is here, once. One step is planned in this order:
requests that the head of waiting displaces, decodes, unfinished prompts, new admissions.

A request is admitted when blocks for all its known tokens are free, and gets them at once. So a prompt in chunks never
runs out half-way, a resumed one is not preempted for its own next chunk, and a request alone always fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.batch import ScheduledRequest, SchedulerOutput, Verdict
from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus
from core.scheduling.blocks import BlockBudget
from core.scheduling.plan import Blocked, Plan, in_prompt
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queues import Queues
from core.stages.scheduler import Counts, SchedulerContext


class QueueScheduler:
    """A `core.stages.scheduler.Scheduler` for any `Policy`."""

    def __init__(self, settings: QueueSettings, context: SchedulerContext, policy: Policy):
        self._max_tokens = settings.max_num_scheduled_tokens
        self._max_running = settings.max_num_running_reqs
        self._cache = context.cache
        self._prefill = context.prefill
        self._decode = context.decode
        self._clock = context.clock
        self._max_model_len = context.max_model_len
        self._policy = policy
        self._queues = Queues()
        self._blocks = BlockBudget(context.cache)
        self._step = 0
        self._blocked: Blocked | None = None

    def add(self, request: Request) -> None:
        if request.request_id not in self._queues:  # else a message that came twice; the first one lives
            self._queues.add(request)

    def schedule(self) -> SchedulerOutput:
        self._step += 1
        plan = Plan(self._step, self._max_tokens)
        self._displace(plan)
        running = self._policy.running_order(self._queues.running)
        # Decodes first: one token each is what clients wait for, and a long chunk can wait (idea: Sarathi-Serve).
        prompts = [request for request in running if in_prompt(request)]
        decodes = [request for request in running if not in_prompt(request)] if prompts else list(running)
        self._propose(decodes)
        plan.num_to_plan = len(running)
        for request in decodes + prompts:
            plan.num_to_plan -= 1
            if request.status is RequestStatus.RUNNING and request.request_id not in plan.planned_ids:
                self._continue(request, plan)
        if plan.stalled and not plan.parts:
            self._unblock(plan)
        if plan.admits:
            self._admit(plan)
        output = SchedulerOutput(plan.step, tuple(plan.parts), tuple(plan.preempted), tuple(plan.refused))
        self._policy.planned(output)
        return output

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        ended = []
        for part in output.scheduled:
            # Also true for an aborted request whose id lives on in a new one: the part holds the old record.
            if not part.request.is_finished and self._take_in(part, output.step, verdicts):
                ended.append(part.request)
        return ended

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        # A step in flight may still read and write the blocks that go back here. That is safe: device work runs in the
        # order of planning, so a step that is given these blocks writes them after the step in flight is through, and
        # that step writes no findable block, since only positions of finished steps are committed.
        found = self._queues.find(request_ids)
        for request in found:
            self._end(request, reason)
        return found

    def counts(self) -> Counts:
        return Counts(running=len(self._queues.running), waiting=len(self._queues.waiting))

    # Running requests

    def _propose(self, decodes: Sequence[Request]) -> None:
        """Ask stage 6 for drafts. With ids in flight there is nothing to draft from."""
        settled = [request for request in decodes if not request.num_pending_tokens]
        drafts = self._decode.propose(settled) if settled else {}
        for request in settled if drafts else ():
            # The step samples one id beyond the drafts; no draft may stand where the request has ended already.
            room = min(request.params.max_tokens - request.num_output_tokens, self._max_model_len - request.num_tokens)
            request.draft_token_ids = list(drafts.get(request.request_id, ())[: max(room - 1, 0)])

    def _continue(self, request: Request, plan: Plan) -> None:
        num_tokens = self._num_tokens(request, plan)
        if not num_tokens:
            plan.admits = plan.admits and not in_prompt(request)
            return
        if request.draft_token_ids and not self._cache.allocate(request, request.num_computed_tokens + num_tokens):
            num_tokens -= len(request.draft_token_ids)  # a guess is no reason to preempt anyone
            request.draft_token_ids = []
        if self._reserve(request, request.num_computed_tokens + num_tokens, plan):
            self._plan(request, num_tokens, plan)
        elif self._never_fits(request) and not request.num_pending_tokens:
            self._refuse(request, plan)
        else:
            plan.stalled.append(request)
            plan.admits = False

    def _num_tokens(self, request: Request, plan: Plan) -> int:
        if in_prompt(request):
            remaining = request.num_known_tokens - request.num_computed_tokens
            return self._prefill.num_tokens(request, remaining, plan.token_budget)
        if request.num_pending_tokens and self._waits_for_update(request):
            return 0
        if request.draft_token_ids:  # drafts take what the others leave
            del request.draft_token_ids[max(plan.token_budget - plan.num_to_plan - 1, 0) :]
        return min(request.num_known_tokens - request.num_computed_tokens, plan.token_budget)

    def _waits_for_update(self, request: Request) -> bool:
        """Whether steps in flight decide how the request goes on: verified drafts, or the last token it may have."""
        in_flight = request.num_pending_tokens
        return (
            bool(request.draft_token_ids)
            or request.num_output_tokens + in_flight >= request.params.max_tokens
            or request.num_tokens + in_flight >= self._max_model_len
        )

    def _plan(self, request: Request, num_tokens: int, plan: Plan) -> None:
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_known_tokens
        num_drafts = len(request.draft_token_ids)
        plan.parts.append(ScheduledRequest(request, start, num_tokens, num_drafts, samples))
        plan.planned_ids.add(request.request_id)
        plan.token_budget -= num_tokens
        request.num_computed_tokens = start + num_tokens
        if samples:
            request.num_pending_tokens += 1 + num_drafts

    # Blocks and preemption

    def _reserve(self, request: Request, num_positions: int, plan: Plan) -> bool:
        """Blocks for `num_positions` of a running request, at the cost of others where the policy allows."""
        if num_positions <= len(request.block_table) * self._cache.block_size:
            return True  # nearly always: a decode in a block that it has
        if self._cache.allocate(request, num_positions):
            return True
        missing = self._blocks.num_missing(request, num_positions)
        victims = self._policy.victims(request, self._queues.running)
        chosen = self._blocks.choose(
            (victim for victim in victims if victim.request_id not in plan.planned_ids), missing, 0
        )
        self._preempt(chosen, plan)
        return bool(chosen) and self._cache.allocate(request, num_positions)

    def _preempt(self, victims: Iterable[Request], plan: Plan) -> None:
        """Back to waiting, to be recomputed. Tokens in flight are kept when they arrive (see `_take_in`)."""
        for request in victims:
            self._cache.free(request)
            self._queues.preempt(request)
            self._queues.entry(request).preempted_step = plan.step
            request.num_computed_tokens = request.num_cached_tokens = 0
            request.num_preemptions += 1
            request.draft_token_ids = []
            plan.preempted.append(request)
            plan.admits = False  # what it gave up is not for the waiting

    def _unblock(self, plan: Plan) -> None:
        """All running requests lack blocks, so no end of one would free any: leave the pool to the first of them."""
        if any(request.num_pending_tokens for request in self._queues.running):
            return  # a step in flight may end one
        first = plan.stalled[0]
        others = [request for request in reversed(self._queues.running) if request is not first]
        if self._cache.num_freed_by(others) >= self._blocks.num_missing(first, first.num_known_tokens):
            self._preempt(others, plan)
            self._continue(first, plan)

    def _displace(self, plan: Plan) -> None:
        """Let the first waiting request push running ones out, where the policy says so and it lacks slot or blocks."""
        if not self._queues.waiting or not self._queues.running:
            return
        head = self._policy.waiting_order(self._queues.waiting)[0]
        victims = self._policy.displaced_by(head, self._queues.running)
        if not victims or head.num_pending_tokens:
            return
        self._cache.lookup(head)
        missing = self._blocks.num_missing(head, head.num_known_tokens) + self._num_spare(head)
        self._cache.free(head)
        num_slots = max(len(self._queues.running) + 1 - self._max_running, 0)
        chosen = self._blocks.choose(victims, missing, num_slots) if missing > 0 or num_slots else []
        if not chosen:
            return
        self._preempt(chosen, plan)
        plan.admits = True
        plan.token_budget -= len(self._queues.running)  # the others keep a token each
        self._start(head, plan)
        plan.token_budget += len(self._queues.running) - (head.status is RequestStatus.RUNNING)

    # Waiting requests

    def _admit(self, plan: Plan) -> None:
        if not self._queues.waiting or not plan.token_budget or len(self._queues.running) >= self._max_running:
            return
        for request in tuple(self._policy.waiting_order(self._queues.waiting)):
            if not plan.token_budget or len(self._queues.running) >= self._max_running:
                return
            if not self._start(request, plan) and self._policy.head_of_line:
                return

    def _start(self, request: Request, plan: Plan) -> bool:
        """Admit one waiting request, or refuse it for good. False: it waits on."""
        if request.num_pending_tokens:
            return False  # preempted in flight: its last id is still to come
        if self._never_fits(request):
            self._refuse(request, plan)
            return True
        if self._blocked and self._blocked.still(request, self._cache.num_free_blocks, len(self._queues.running)):
            return False
        num_cached = self._cache.lookup(request)
        num_tokens = self._prefill.num_tokens(request, request.num_known_tokens - num_cached, plan.token_budget)
        if not num_tokens or not self._allocate_all(request):
            self._cache.free(request)
            if num_tokens:
                self._blocked = Blocked(request, self._cache.num_free_blocks, len(self._queues.running))
            return False
        self._enter(request, num_cached)
        self._plan(request, num_tokens, plan)
        return True

    def _allocate_all(self, request: Request) -> bool:
        missing = self._blocks.num_missing(request, request.num_known_tokens) + self._num_spare(request)
        return missing <= 0 and self._cache.allocate(request, request.num_known_tokens)

    def _num_spare(self, request: Request) -> int:
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

    # Results and endings

    def _take_in(self, part: ScheduledRequest, step: int, verdicts: Mapping[str, Verdict]) -> bool:
        """One request's result; True when it has ended."""
        request = part.request
        verdict = verdicts.get(request.request_id)
        kept = verdict.token_ids if verdict and part.samples else ()
        num_sampled = 1 + part.num_drafts if part.samples else 0
        request.append_output(kept)
        request.num_pending_tokens -= num_sampled
        if part.num_drafts:
            request.draft_token_ids = []
        if step >= self._queues.entry(request).preempted_step:
            num_rejected = min(num_sampled - len(kept), part.num_drafts)
            request.num_computed_tokens -= num_rejected
            self._commit(request, part.start, part.start + part.num_tokens - num_rejected)
        if verdict and verdict.finish_reason:
            request.stop_reason = verdict.stop_reason
            self._end(request, verdict.finish_reason)
        elif part.samples and not kept:
            request.stop_reason = "the step brought no token for this request"
            self._end(request, FinishReason.ERROR)
        return request.is_finished

    def _commit(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end) are written; the cache is told where a block became full with them."""
        size = self._cache.block_size
        if end // size > start // size:
            self._cache.commit(request, end)

    def _never_fits(self, request: Request) -> bool:
        impossible = not 0 < request.num_prompt_tokens <= self._max_model_len
        return impossible or self._blocks.num_needed(request.num_known_tokens) > self._cache.num_blocks

    def _refuse(self, request: Request, plan: Plan) -> None:
        request.stop_reason = (
            f"{request.num_known_tokens} tokens do not fit {self._cache.num_blocks} KV blocks of "
            f"{self._cache.block_size} or max_model_len {self._max_model_len}; raise cache.memory or shorten the request"
        )
        self._end(request, FinishReason.ERROR)
        plan.refused.append(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._queues.remove(request)
        self._cache.free(request, discard=reason is FinishReason.ERROR)
        request.status = STATUS_OF_REASON[reason]
        request.finish_reason = reason
        request.num_pending_tokens = 0
        request.draft_token_ids = []
        self._blocked = None
        self._policy.left(request)
