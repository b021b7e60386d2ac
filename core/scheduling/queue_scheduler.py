"""The mechanism that scheduling policies share: queues, budgets, prefix hits, blocks, preemption, endings.

A policy says who comes first and who gives way; everything else is here, once. One step is planned in this order:
waiting requests that push running ones out, decodes, unfinished prompts, new admissions.

What a step costs here is a few attribute reads per plain decode: a request in a block that it has (`Entry.limit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from core.batch import ScheduledRequest, SchedulerOutput, Verdict
from core.request import STATUS_OF_REASON, FinishReason, Request
from core.scheduling.blocks import BlockBudget
from core.scheduling.expiry import Expiry
from core.scheduling.plan import RUNNING, Entry, NoRoom, Plan, Trial, in_prompt, num_equal
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.preempted_kv import PreemptedKV
from core.scheduling.queues import Queues
from core.scheduling.starts import MAX_PASSED, Starts
from core.stages.scheduler import Counts, SchedulerContext


class QueueScheduler:
    """A `core.stages.scheduler.Scheduler` for any `Policy`."""

    def __init__(self, settings: QueueSettings, context: SchedulerContext, policy: Policy):
        self._max_tokens = settings.max_num_scheduled_tokens
        self._max_running = settings.max_num_running_reqs
        self._cache = context.cache
        self._prefill = context.prefill
        self._decode = context.decode
        self._drafts = True  # whether stage 6 is asked for drafts in this step
        self._clock = context.clock
        self._max_model_len = context.max_model_len
        self._policy = policy
        self._displaces = type(policy).displaced_by is not Policy.displaced_by
        self._reorders = type(policy).running_order is not Policy.running_order
        self._queues = Queues(policy)
        self._expiry = Expiry(self._queues.get)
        self._blocks = BlockBudget(context.cache)
        self._kv = PreemptedKV(context.cache, settings.preemption, context.swap_cost)
        self._starts = Starts(settings, context, policy, self._queues, self._kv, self._plan)
        self._step = 0
        self._last_preempting_step = 0
        self._no_room: NoRoom | None = None

    def add(self, request: Request) -> None:
        if request.request_id not in self._queues:  # else a message that came twice; the first one lives
            self._queues.add(request)
            self._expiry.add(request)

    def schedule(self) -> SchedulerOutput:
        self._step += 1
        self._drafts = getattr(self._decode, "proposes", True)
        plan = Plan(self._step, self._max_tokens)
        if self._expiry:
            self._expire(plan)
        if self._displaces:
            self._displace(plan)
        plain, decodes, prompts = self._running(plan.planned_ids)
        if decodes and self._drafts:
            self._propose(decodes)
        plan.num_to_plan = len(plain) + len(decodes) + len(prompts)
        # Decodes first: one token each is what clients wait for, and a long chunk can wait (idea: Sarathi-Serve).
        self._continue_all(decodes, plan)
        self._continue_plain(plain, plan)
        self._continue_all(prompts, plan)
        if plan.stalled and not plan.parts:
            self._unblock(plan)
        if plan.admits and self._queues.waiting and len(self._queues.running) < self._max_running:
            self._admit(self._policy.waiting_order(self._queues.waiting), plan)
        output = SchedulerOutput(plan.step, tuple(plan.parts), tuple(plan.preempted), tuple(plan.refused))
        self._policy.planned(output)
        return output

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        ended: list[Request] = []
        verdict_of, size, extend = verdicts.get, self._cache.block_size, list.extend
        intact = output.step >= self._last_preempting_step  # none of its parts has lost its blocks since
        for part in output.scheduled:
            request = part.request
            verdict = verdict_of(request.request_id)
            if (  # nearly always: one token, and the request goes on
                intact
                and verdict is not None
                and verdict.finish_reason is None
                and verdict.token_ids
                and part.samples
                and not part.num_drafts
                and request.finish_reason is None
            ):
                extend(request.output_token_ids, verdict.token_ids)  # `append_output`, without the call
                request.num_pending_tokens -= 1
                if len(verdict.token_ids) > 1:
                    self._force(self._queues.entry(request))
                if part.num_tokens > 1 or not (part.start + 1) % size:
                    self._commit(request, part.start, part.start + part.num_tokens)
                continue
            # Also true for an aborted request whose id lives on in a new one: the part holds the old record.
            if not request.is_finished and self._take_in(part, output.step, verdict):
                ended.append(request)
        return ended

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        # A step in flight may still read and write the blocks that go back here. That is safe: device work runs in the
        # order of planning, so a step that is given these blocks writes them after the step in flight is through, and
        # that step writes no findable block, since only positions of finished steps are committed.
        found = self._queues.find(request_ids)
        for request in found:
            self._end(request, reason)
        return found

    @property
    def counts_steps(self) -> bool:
        """Whether one plan may not stand for several steps (`stride` of a simulation)."""
        return self._policy.counts_steps

    def counts(self) -> Counts:
        swapped = self._queues.num_swapped
        return Counts(len(self._queues.running), len(self._queues.waiting) - swapped, swapped)

    # Running requests

    def _running(self, planned_ids: set[str]) -> tuple[list[Entry], list[Request], list[Request]]:
        """Plain decodes, which need nothing but their turn; other decodes; unfinished prompts. All but the planned ones."""
        plain: list[Entry] = []
        others: list[Request] = []
        lanes, drafts = self._queues.lanes, self._drafts
        if planned_ids:
            lanes = [entry for entry in lanes if entry.request.request_id not in planned_ids]
        for entry in lanes:
            if entry.request.num_computed_tokens < entry.limit and not drafts:
                plain.append(entry)
            else:
                others.append(entry.request)
        if others and self._reorders:
            wanted = set(others)
            others = [request for request in self._policy.running_order(self._queues.running) if request in wanted]
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in others:
            (prompts if self._in_prompt(request) else decodes).append(request)
        return plain, decodes, prompts

    def _in_prompt(self, request: Request) -> bool:
        return in_prompt(request) and not self._queues.entry(request).forced

    def _continue_plain(self, plain: Sequence[Entry], plan: Plan) -> None:
        """A token for each. They know all their tokens but the one that they sample, and have a block for it."""
        append, lost = plan.parts.append, bool(plan.preempted)
        for entry in plain:
            request = entry.request
            if lost and (request.status is not RUNNING or not entry.limit):
                continue  # gave way to another decode
            start = request.num_computed_tokens
            append(ScheduledRequest(request, start, 1))
            request.num_computed_tokens = start + 1
            request.num_pending_tokens += 1
        plan.token_budget -= len(plain)
        plan.num_to_plan -= len(plain)

    def _continue_all(self, requests: Sequence[Request], plan: Plan) -> None:
        for request in requests:
            plan.num_to_plan -= 1
            if request.status is RUNNING and request.request_id not in plan.planned_ids:
                self._continue(request, plan)

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
            plan.admits = plan.admits and not self._in_prompt(request)
            return
        if request.draft_token_ids and not self._cache.allocate(request, request.num_computed_tokens + num_tokens):
            num_tokens -= len(request.draft_token_ids)  # a guess is no reason to preempt anyone
            request.draft_token_ids = []
        if self._reserve(request, request.num_computed_tokens + num_tokens, plan):
            self._plan(request, num_tokens, plan)
        elif self._starts.never_fits(request) and not request.num_pending_tokens:
            self._refuse(request, plan)
        else:
            plan.stalled.append(request)
            plan.admits = False

    def _num_tokens(self, request: Request, plan: Plan) -> int:
        if self._in_prompt(request):
            remaining = request.num_known_tokens - request.num_computed_tokens
            return self._prefill.num_tokens(request, remaining, plan.token_budget)
        if request.num_pending_tokens and self._waits_for_update(request):
            return 0
        room = plan.token_budget - plan.num_to_plan  # what the others leave: a token is for each of them
        if request.draft_token_ids:
            num_settled = request.num_known_tokens - len(request.draft_token_ids) - request.num_computed_tokens
            del request.draft_token_ids[max(room - num_settled, 0) :]
        return min(request.num_known_tokens - request.num_computed_tokens, room)

    def _waits_for_update(self, request: Request) -> bool:
        """Whether steps in flight decide how the request goes on: verified drafts, or the last token it may have."""
        in_flight = request.num_pending_tokens
        return (
            bool(request.draft_token_ids)
            or request.num_output_tokens + in_flight >= request.params.max_tokens
            or request.num_tokens + in_flight >= self._max_model_len
        )

    def _plan(self, request: Request, num_tokens: int, plan: Plan) -> None:
        start, num_drafts = request.num_computed_tokens, len(request.draft_token_ids)
        samples = start + num_tokens == request.num_known_tokens
        plan.parts.append(ScheduledRequest(request, start, num_tokens, num_drafts, samples))
        plan.planned_ids.add(request.request_id)
        plan.token_budget -= num_tokens
        request.num_computed_tokens = start + num_tokens
        if samples:
            request.num_pending_tokens += 1 + num_drafts
            if num_tokens > 1:
                self._starts.changed()  # nearly always the end of a prompt, behind which stage 5 may hold others back
            entry = self._queues.entry(request)
            entry.limit, entry.forced = 0 if num_drafts else self._limit(request), False

    def _limit(self, request: Request) -> int:
        """The position below which decodes are plain: in a block that it has, and before the last token that it may have."""
        last = min(len(request.prompt_token_ids) + request.params.max_tokens, self._max_model_len) - 1
        return min(len(request.block_table) * self._cache.block_size, last)

    # Blocks and preemption

    def _reserve(self, request: Request, num_positions: int, plan: Plan) -> bool:
        """Blocks for `num_positions` of a running request, at the cost of others where the policy allows."""
        held = len(request.block_table) * self._cache.block_size
        if (num_positions <= held and not in_prompt(request)) or self._cache.allocate(request, num_positions):
            return True
        missing = self._blocks.num_missing(request, num_positions)
        victims = self._policy.victims(request, self._queues.running)
        chosen = self._blocks.choose(
            (victim for victim in victims if victim.request_id not in plan.planned_ids), missing, 0
        )
        self._preempt(chosen, plan)
        return bool(chosen) and self._cache.allocate(request, num_positions)

    def _preempt(self, victims: Iterable[Request], plan: Plan) -> None:
        """Back to waiting, KV kept in host memory or computed again. Tokens in flight are kept when they arrive."""
        for request in victims:
            entry = self._queues.entry(request)
            entry.preempted_step = self._last_preempting_step = plan.step
            entry.limit, entry.forced = 0, False
            status = self._kv.give_up(request)
            request.num_computed_tokens = request.num_cached_tokens = 0
            request.num_preemptions += 1
            request.draft_token_ids = []
            self._queues.preempt(request, status)
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
        """Let waiting requests, in their order, push running ones out while the policy says so and they lack slot or blocks."""
        num_held_back, victims = 0, deque[Request]()
        while self._queues.waiting and self._queues.running and num_held_back < MAX_PASSED:
            head = self._starts.first(self._policy.waiting_order(self._queues.waiting))
            if head is None or head.num_pending_tokens or head in plan.preempted:
                return
            if not victims or not self._policy.displaces_alike:
                victims = deque(self._policy.displaced_by(head, self._queues.running))
            while victims and (victims[0].status is not RUNNING or victims[0].request_id in plan.planned_ids):
                victims.popleft()
            if not victims or (self._no_room and self._no_room.still(head, len(victims), self._cache.num_free_blocks)):
                return
            plan.num_to_plan = len(self._queues.running) - len(plan.planned_ids) - 1  # one of them gives way
            missing = self._starts.num_missing(head, plan)
            if missing is None and self._starts.holds_back(head):
                num_held_back += 1
                continue
            if missing is None or not self._make_room(head, missing, victims, plan):
                return
            plan.num_to_plan = len(self._queues.running) - len(plan.planned_ids)
            self._starts.changed()  # there is room for it now
            if self._admit([head], plan) is not Trial.STARTED:
                return
            plan.admits = True

    def _make_room(self, head: Request, missing: int, victims: Iterable[Request], plan: Plan) -> bool:
        """False, with nothing changed: all that `victims` could give would not do."""
        num_slots = max(len(self._queues.running) + 1 - self._max_running, 0)
        if missing <= 0 and not num_slots:
            return True
        spare = self._starts.num_spare(head)  # of it, a block for each that leaves is not needed
        chosen = self._blocks.choose(plan.unplanned(victims), missing, num_slots, 1 if spare else 0)
        if not chosen:
            everybody = list(plan.unplanned(victims))
            if len(everybody) == len(self._queues.running):
                chosen = self._blocks.choose(everybody, missing - spare, num_slots)  # alone it needs none to spare
                chosen = everybody if chosen else []
            if not chosen:
                self._no_room = NoRoom(head, len(everybody), self._cache.num_free_blocks)
        self._preempt(chosen, plan)
        return bool(chosen)

    def _admit(self, order: Iterable[Request], plan: Plan) -> Trial:
        tried = self._starts.admit(order, plan)
        for request in tried.refused:
            self._refuse(request, plan)
        return tried.last

    # Results and endings

    def _take_in(self, part: ScheduledRequest, step: int, verdict: Verdict | None) -> bool:
        """One request's result; True when it has ended."""
        request = part.request
        kept = verdict.token_ids if verdict and part.samples else ()
        num_sampled = 1 + part.num_drafts if part.samples else 0
        num_rejected = part.num_drafts - num_equal(kept, request.draft_token_ids) if part.num_drafts else 0
        request.append_output(kept)
        request.num_pending_tokens -= num_sampled
        if part.num_drafts:
            request.draft_token_ids = []
        entry = self._queues.entry(request)
        if step >= entry.preempted_step:
            request.num_computed_tokens -= num_rejected
            self._commit(request, part.start, part.start + part.num_tokens - num_rejected)
            if part.num_drafts:  # it is settled again; the next step may be one without drafts
                entry.limit = self._limit(request)
            if len(kept) > num_sampled > 0:
                self._force(entry)
        if verdict and verdict.finish_reason:
            request.stop_reason = verdict.stop_reason
            self._end(request, verdict.finish_reason)
        elif part.samples and not kept:
            request.stop_reason = "the step brought no token for this request"
            self._end(request, FinishReason.ERROR)
        return request.is_finished

    def _force(self, entry: Entry) -> None:
        """The next step computes what a grammar has forced after the id that was sampled."""
        entry.limit, entry.forced = 0, True

    def _commit(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end) are written; the cache is told where a block became full with them."""
        size = self._cache.block_size
        if end // size > start // size:
            self._cache.commit(request, end)

    def _refuse(self, request: Request, plan: Plan) -> None:
        request.stop_reason = (
            f"{request.num_known_tokens} tokens do not fit {self._cache.num_blocks} KV blocks of "
            f"{self._cache.block_size} or max_model_len {self._max_model_len}; raise cache.memory or shorten the request"
        )
        self._end(request, FinishReason.ERROR)
        plan.refused.append(request)

    def _expire(self, plan: Plan) -> None:
        for request in self._expiry.pop_due(self._clock()):
            self._end(request, FinishReason.EXPIRED)
            plan.refused.append(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._queues.remove(request)
        self._cache.free(request, discard=reason is FinishReason.ERROR)
        request.status = STATUS_OF_REASON[reason]
        request.finish_reason = reason
        request.num_pending_tokens = 0
        request.draft_token_ids = []
        self._starts.ended(request)
        self._no_room = None
        self._policy.left(request)
