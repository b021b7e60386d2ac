"""`scheduler: slo`: earliest deadline first, for as many requests as possible within their latency targets (goodput).

Before its first token a request is due at `arrival_time + ttft_s` (or at its own deadline, when that is earlier); after it,
its next token is due at `first token + num_output_tokens * tpot_s`. Of those waiting, the earliest due goes first; a preempted
request whose next token is overdue is the most urgent of all, since faster tokens make up for it (the target is a mean).

A request that can no longer have its first token in time is late, and nothing saves it. (How long that token takes from
admission on is learnt, for nine in ten.) It yields to those that can be saved: they are admitted before it, and while it runs
they may take its slot or blocks, until it has been preempted `max_preemptions` times.

Bound, so that nobody starves: while late requests wait, every `late_every`-th admission is the turn of the one which was due
first, and it keeps its slot. So the n-th of them starts for good within `n * late_every` admissions; that share is the price.

Running requests get blocks in order of the time their first token was due, which never changes: no two preempt each other in
turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from math import inf

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext
from plugins.schedulers.tiers import Tier, check_tiers

RISE, FALL = 0.3, 0.03  # weight of the latest request in a running estimate: one that nine of ten stay below
Rank = tuple[bool, float]  # (new or lost?, when its next token is due)


class Targets(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    ttft_s: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="seconds to the first token")
    tpot_s: float = Field(default=0.1, gt=0, allow_inf_nan=False, description="seconds per token after the first")


class TierTargets(Tier, Targets):
    pass


class Slo(QueueScheduler):
    class Settings(QueueSettings, Targets):
        tiers: Mapping[str, TierTargets] = Field(default_factory=dict, description="tier name -> tenants, own targets")
        late_every: int = Field(
            default=4, ge=2, description="one of so many admissions is that of a late request, while such wait"
        )
        max_preemptions: int = Field(
            default=2, ge=0, description="a late request that was preempted so often gives way no more"
        )

        @model_validator(mode="after")
        def _one_tier_each(self) -> Slo.Settings:
            check_tiers(self.tiers)
            return self

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, EarliestDeadline(settings, context.clock))


class EarliestDeadline(Policy):
    def __init__(self, settings: Slo.Settings, clock: Callable[[], float]):
        self._settings = settings
        self._clock = clock
        self._targets: dict[str, Targets] = {
            tenant: tier for tier in settings.tiers.values() for tenant in tier.tenants
        }
        self._ranks: dict[str, Rank] = {}  # of live requests, by id
        self._start_times: dict[str, float] = {}  # when each that has no token yet was admitted
        self._first_times: dict[str, float] = {}  # when each had its first token that had it in time
        self._lost: set[str] = set()  # had it later
        self._lead_s = 0.0  # from admission to the first token
        self._had_turn: set[str] = set()  # late ones that keep their slots
        self._num_since_late = 0  # admissions since that of a late request
        self._too_late = -inf  # to be due, in the order that is being read

    def rank(self, request: Request) -> Rank:
        return self._ranks[request.request_id]

    def waiting_order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        self._too_late = self._clock() + self._lead_s
        first_new = bisect_left(waiting, (True, -inf), key=self.rank)
        first_on_time = bisect_left(waiting, (True, self._too_late), key=self.rank)
        begun, late = _part(waiting, 0, first_new), _part(waiting, first_new, first_on_time)
        return self._shared(late, merge(begun, _part(waiting, first_on_time, len(waiting)), key=self._due))

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        if self._is_late(head):
            return ()
        in_time = self._first_times  # nearly all
        return [r for r in reversed(running) if r.request_id not in in_time and self._yields(r)]

    def joined(self, request: Request) -> None:
        key, first_due = request.request_id, self._first_due(request)
        if request.output_token_ids and key not in self._first_times and key not in self._lost:
            is_new = (
                request.status is RequestStatus.WAITING
            )  # begun under a scheduler that has failed: no time is known
            self._had_token(request, first_due if is_new else self._clock())
        first_time = self._first_times.get(key)
        if first_time is None:
            self._ranks[key] = (True, first_due)
        else:
            self._ranks[key] = (False, first_time + request.num_output_tokens * self._targets_of(request).tpot_s)

    def started(self, request: Request) -> None:
        self._num_since_late += 1
        if self._is_late(request):
            if self._num_since_late >= self._settings.late_every:
                self._had_turn.add(request.request_id)
            self._num_since_late = 0
        self._ranks[request.request_id] = (False, self._first_due(request))
        if not request.output_token_ids:
            self._start_times[request.request_id] = self._clock()

    def planned(self, output: SchedulerOutput) -> None:
        now, in_time, lost = self._clock(), self._first_times, self._lost
        for part in output.scheduled:
            key = part.request.request_id
            if key not in in_time and key not in lost and part.request.output_token_ids:
                self._had_token(part.request, now)

    def left(self, request: Request) -> None:
        del self._ranks[request.request_id]
        self._first_times.pop(request.request_id, None)
        self._start_times.pop(request.request_id, None)
        self._had_turn.discard(request.request_id)
        self._lost.discard(request.request_id)

    def _shared(self, late: Iterator[Request], others: Iterator[Request]) -> Iterator[Request]:
        """Each late one in its turn, and all of them after the others."""
        first_late, first_other = next(late, None), next(others, None)
        while first_late or first_other:
            is_turn = self._num_since_late + 1 >= self._settings.late_every
            if first_late and (is_turn or not first_other):
                yield first_late
                first_late = next(late, None)
            elif first_other:
                yield first_other
                first_other = next(others, None)

    def _due(self, request: Request) -> float:
        return self._ranks[request.request_id][1]

    def _is_late(self, request: Request) -> bool:
        """Of a waiting request."""
        new_or_lost, due = self._ranks[request.request_id]
        return new_or_lost and due < self._too_late

    def _yields(self, request: Request) -> bool:
        """Of a running request that has had no token in time."""
        if request.request_id in self._had_turn or request.num_preemptions >= self._settings.max_preemptions:
            return False
        return request.request_id in self._lost or self._too_late - self._lead_s > self._first_due(request)

    def _had_token(self, request: Request, first_time: float) -> None:
        if first_time > self._first_due(request):
            self._lost.add(request.request_id)
        else:
            self._first_times[request.request_id] = first_time
        start_time = self._start_times.pop(request.request_id, None)
        if start_time is not None:
            change = first_time - start_time - self._lead_s
            self._lead_s += change * (RISE if change > 0 else FALL)

    def _first_due(self, request: Request) -> float:
        due = request.arrival_time + self._targets_of(request).ttft_s
        return due if request.deadline is None else min(due, request.deadline)

    def _targets_of(self, request: Request) -> Targets:
        return self._targets.get(request.tenant, self._settings)


def _part(requests: Sequence[Request], start: int, end: int) -> Iterator[Request]:
    """Not a slice: only as many are looked up as are read."""
    return (requests[index] for index in range(start, end))
