"""`scheduler: priority`: better levels first, with aging; the worst running request gives way to a better one.

The level of a request is that of its tenant's tier plus its own `priority` (lower is better), which moves it by at most
`own_levels`. Each request is due at

    due = min(arrival_time + deadline_s, deadline) + level * aging_s

and the earliest due goes first, in waiting as for blocks: a request that has waited for `aging_s` seconds stands where one
of the next better level stands that comes now. All age alike, so the order of two requests never changes.

Bound: no request is overtaken by one that arrived `d * aging_s + deadline_s` seconds or more after it, d being the levels
between them (0 among equals); without deadlines, `d * aging_s`. The levels in use are finite, so every wait is. With
`aging_s` null the levels are strict: there is no bound, and worse ones wait as long as better ones come.

A deadline (expiry itself is the mechanism's) brings a request forward within its level, by `deadline_s` at most: less than
a level is worth.

Slots and blocks are taken from running requests of a worse level that are due later, latest first: never from an equal, nor
from one that has been preempted `max_preemptions` times. Such a request was due after the one it made way for and stays so,
so that two never push each other out in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext
from plugins.schedulers.tiers import Tier, check_tiers

Rank = tuple[int, float]


class LevelTier(Tier):
    level: int = Field(description="level of their requests; lower is better")


class Priority(QueueScheduler):
    class Settings(QueueSettings):
        tiers: Mapping[str, LevelTier] = Field(default_factory=dict, description="tier name -> its tenants and level")
        default_level: int = Field(default=0, description="level of tenants that are in no tier")
        own_levels: int = Field(default=8, ge=0, description="levels by which `priority` moves a request at most")
        aging_s: float | None = Field(
            default=30.0, gt=0, allow_inf_nan=False, description="seconds of waiting worth a level; null: strict levels"
        )
        deadline_s: float = Field(
            default=10.0, ge=0, allow_inf_nan=False, description="seconds by which a deadline brings forward at most"
        )
        max_preemptions: int = Field(
            default=2, ge=0, description="a request that was preempted so often no longer gives way to better levels"
        )

        @model_validator(mode="after")
        def _consistent(self) -> Priority.Settings:
            check_tiers(self.tiers)
            if self.aging_s is not None and self.deadline_s >= self.aging_s:
                raise ValueError(
                    f"scheduler.deadline_s ({self.deadline_s}) is not below scheduler.aging_s ({self.aging_s}): a deadline "
                    "would count for more than a level; lower the first or raise the second"
                )
            return self

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, ByLevel(settings))


@dataclass(slots=True)
class Displaced:
    """Who gives way to a head. Those for the next head of its level in a step, which is due no sooner, are among them: so a burst
    is looked through once, and not once for each of it."""

    level: int
    rank: Rank
    running: Sequence[Request]
    victims: deque[Request]


class ByLevel(Policy):
    def __init__(self, settings: Priority.Settings):
        self._settings = settings
        self._tier_levels = {tenant: tier.level for tier in settings.tiers.values() for tenant in tier.tenants}
        self._levels: dict[str, int] = {}  # of live requests, by id
        self._ranks: dict[str, Rank] = {}  # likewise
        self._last: Displaced | None = None  # in this step

    def rank(self, request: Request) -> Rank:
        return self._ranks[request.request_id]

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        level, rank, last = self._levels[head.request_id], self._ranks[head.request_id], self._last
        if last is None or last.level != level or last.rank > rank or last.running is not running:
            last = self._last = Displaced(level, rank, running, deque(self._worse(level, rank, running)))
        ranks, victims, last.rank = self._ranks, last.victims, rank
        while victims and victims[0].status is not RequestStatus.RUNNING:
            victims.popleft()
        while victims and ranks[victims[-1].request_id] <= rank:
            victims.pop()
        return victims

    def _worse(self, level: int, rank: Rank, running: Sequence[Request]) -> Iterator[Request]:
        """Latest due first."""
        for request in reversed(running):
            if self._ranks[request.request_id] <= rank:
                return
            if self._levels[request.request_id] > level and request.num_preemptions < self._settings.max_preemptions:
                yield request

    def planned(self, output: SchedulerOutput) -> None:
        self._last = None

    def joined(self, request: Request) -> None:
        if request.request_id not in self._ranks:
            self._levels[request.request_id] = level = self._level(request)
            self._ranks[request.request_id] = self._rank(request, level)

    def left(self, request: Request) -> None:
        del self._levels[request.request_id], self._ranks[request.request_id]

    def _level(self, request: Request) -> int:
        own = self._settings.own_levels
        tier = self._tier_levels.get(request.tenant, self._settings.default_level)
        return tier + min(max(request.priority, -own), own)

    def _rank(self, request: Request, level: int) -> Rank:
        settings = self._settings
        due = request.arrival_time + settings.deadline_s
        if request.deadline is not None and request.deadline < due:
            due = max(request.deadline, request.arrival_time)
        return (level, due) if settings.aging_s is None else (0, due + level * settings.aging_s)
