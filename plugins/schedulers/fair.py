"""`scheduler: fair`: service is shared among tenants by weight, whatever each of them asks for (R4.4).

`mode: tokens` is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24). A
tenant's counter grows by `input_weight` per prompt token when a request of it is admitted and by `output_weight` per token
of output, over the tenant's weight; next is the oldest request of the tenant whose counter is smallest. Two tenants of
weight 1 that both have requests waiting throughout differ in what they get by at most 2 max(wp L, wq M), L the longest
prompt and M the tokens that the KV pool holds. Prompt tokens found in the prefix cache, and tokens computed again after a
preemption, cost nothing.

`mode: round_robin` is weighted round robin over the queues of tiers: a counter per tier, which grows by one per admission
over its weight (idea: stride scheduling, Waldspurger and Weihl, 1995). Within a tier, first come, first served.

With `displace_after` a tenant that lags so far behind takes slots and blocks from one that has more of them, the youngest
request first. Two never push each other out in turn: who gives way is still ahead once the other has been charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from core.batch import SchedulerOutput
from core.request import Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext
from plugins.schedulers.fair_queue import Account, FairQueue
from plugins.schedulers.tiers import Tier, check_tiers


class WeightTier(Tier):
    weight: float = Field(ge=1e-6, le=1e6, description="share of each of them (tokens), or of the tier (round_robin)")


class Fair(QueueScheduler):
    class Settings(QueueSettings):
        mode: Literal["tokens", "round_robin"] = Field(
            default="tokens", description="share tokens among tenants, or admissions among tiers"
        )
        input_weight: float = Field(default=1.0, ge=0, le=1e6, description="cost of a prompt token")
        output_weight: float = Field(default=2.0, gt=0, le=1e6, description="cost of a token of output")
        tiers: Mapping[str, WeightTier] = Field(default_factory=dict, description="tier name -> its tenants and weight")
        default_weight: float = Field(default=1.0, ge=1e-6, le=1e6, description="weight of tenants that are in no tier")
        displace_after: float | None = Field(
            default=None, gt=0, description="cost by which a tenant may lag while others have more slots; null: any"
        )
        max_preemptions: int = Field(
            default=2, ge=0, description="a request that was preempted so often no longer gives way to other tenants"
        )

        @model_validator(mode="after")
        def _consistent(self) -> Fair.Settings:
            check_tiers(self.tiers)
            self._check_keys()
            return self

        def _check_keys(self) -> None:
            """Nothing that is set is without effect."""
            if self.mode == "round_robin" and self.displace_after is not None:
                raise ValueError("scheduler.displace_after is a cost in tokens: it needs scheduler.mode=tokens")
            costs = sorted({"input_weight", "output_weight"} & self.model_fields_set)
            if self.mode == "round_robin" and costs:
                named = " and ".join(f"scheduler.{key}" for key in costs)
                raise ValueError(
                    f"scheduler.mode=round_robin counts admissions, and no tokens: leave out {named}, or set "
                    "scheduler.mode=tokens"
                )
            if self.displace_after is None and "max_preemptions" in self.model_fields_set:
                raise ValueError(
                    "scheduler.max_preemptions is for running requests that make way for other tenants, and none does "
                    "without scheduler.displace_after; set that too, or leave out the first"
                )

    def __init__(self, settings: Settings, context: SchedulerContext):
        policy = SmallestCounter(settings) if settings.displace_after is None else Displacing(settings)
        super().__init__(settings, context, policy)


@dataclass(slots=True, eq=False)
class Member:
    """A request in flight."""

    request: Request
    account: Account
    order: int  # of arrival
    num_charged: int  # tokens of output
    has_started: bool = False


class SmallestCounter(Policy):
    """Output is charged for when a counter is asked for, at most once per step."""

    def __init__(self, settings: Fair.Settings):
        self._settings = settings
        self._by_tokens = settings.mode == "tokens"
        self._tiers = {tenant: name for name, tier in settings.tiers.items() for tenant in tier.tenants}
        self._queue = FairQueue()
        self._num_joined = 0
        self._members: dict[str, Member] = {}
        self._running: dict[str, Member] = {}
        self._new: list[Member] = []  # admitted in this step for the first time
        self._is_charged = True  # for the output of all steps so far

    def waiting_order(self, waiting: Sequence[Request]) -> Iterator[Request]:
        self._charge_all()
        return self._queue.in_order()

    def joined(self, request: Request) -> None:
        self._charge_all()  # who comes back is lifted to the counters of now
        member = self._members.get(request.request_id)
        if member is None:
            self._num_joined += 1
            member = Member(request, self._account(request), self._num_joined, request.num_output_tokens)
            self._members[request.request_id] = member
        else:  # preempted
            self._leave_running(member)
        self._queue.add(member.account, member.order, request)

    def started(self, request: Request) -> None:
        member = self._members[request.request_id]
        self._queue.remove(member.account, member.order)
        self._running[request.request_id] = member
        member.account.num_running += 1
        if not member.has_started:
            member.has_started = True
            self._queue.charge(member.account, self._cost_of_start(request))
            self._new.append(member)

    def planned(self, output: SchedulerOutput) -> None:
        self._is_charged = False
        for member in self._new if self._by_tokens else ():
            num_cached = member.request.num_cached_tokens  # not known before
            self._queue.charge(member.account, -num_cached * self._settings.input_weight)
        self._new.clear()

    def left(self, request: Request) -> None:
        member = self._members.pop(request.request_id)
        if request.request_id in self._running:
            self._leave_running(member)
        else:
            self._queue.remove(member.account, member.order)
        if self._members:
            self._queue.settle(member.account)
        else:
            self._queue.clear()

    def _account(self, request: Request) -> Account:
        tier = self._tiers.get(request.tenant, "")
        settings = self._settings.tiers.get(tier)
        weight = self._settings.default_weight if settings is None else settings.weight
        return self._queue.account(request.tenant if self._by_tokens else tier, weight)

    def _cost_of_start(self, request: Request) -> float:
        return request.num_prompt_tokens * self._settings.input_weight if self._by_tokens else 1.0

    def _charge_all(self) -> None:
        for member in () if self._is_charged else self._running.values():
            self._charge_output(member)
        self._is_charged = True

    def _charge_output(self, member: Member) -> None:
        num_tokens = len(member.request.output_token_ids)
        if self._by_tokens and num_tokens > member.num_charged:
            self._queue.charge(member.account, (num_tokens - member.num_charged) * self._settings.output_weight)
        member.num_charged = num_tokens

    def _leave_running(self, member: Member) -> None:
        self._charge_output(member)
        del self._running[member.request.request_id]
        member.account.num_running -= 1


class Displacing(SmallestCounter):
    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        self._charge_all()
        mine = self._members[head.request_id]
        victim = self._furthest_ahead(mine)
        if victim is None:
            return ()
        found = [request for request in reversed(running) if self._gives_way(request, victim)]
        # As many as leave it no less than its part of the slots.
        most = int(victim.num_running - victim.weight * (mine.account.num_running + 1) / mine.account.weight)
        return found[:most]

    def _furthest_ahead(self, mine: Member) -> Account | None:
        """The account that gives way to a waiting request: ahead, also when that has been charged for."""
        account, lag = mine.account, self._settings.displace_after or 0.0
        if not mine.has_started:
            lag += self._cost_of_start(mine.request)
        limit, share = account.counter + lag / account.weight, (account.num_running + 1) / account.weight
        ahead = [
            a for a in self._queue.accounts.values() if a.counter > limit and (a.num_running - 1) / a.weight >= share
        ]
        return max(ahead, key=lambda one: one.counter, default=None)

    def _gives_way(self, request: Request, victim: Account) -> bool:
        member = self._members[request.request_id]
        return member.account is victim and request.num_preemptions < self._settings.max_preemptions
