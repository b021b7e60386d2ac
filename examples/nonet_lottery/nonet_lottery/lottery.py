"""`scheduler: lottery`. Each waiting request holds tickets; whose ticket is drawn is admitted next.

The chance of a request is its tickets over those of all that wait, so more tickets mean a shorter wait, and with one
ticket nobody waits for ever (Waldspurger and Weihl, "Lottery Scheduling", 1994).

Only the order is ours. Budgets, KV blocks, prefix hits, chunked prompts and preemption are the mechanism's,
`core.scheduling.queue_scheduler`, and a policy cannot get them wrong.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from core.request import Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext
from pydantic import Field, PositiveInt

MAX_LEVELS = 20  # priorities beyond this count as this, so that no number of tickets overflows


class Lottery(QueueScheduler):
    """Who runs in a step: config group `scheduler`."""

    class Settings(QueueSettings):
        """Values a user may set, as `scheduler.<key>=<value>`. Wrong ones are refused before a model is read."""

        tickets: PositiveInt = Field(default=1, description="of a request whose tenant is not in tenant_tickets")
        tenant_tickets: Mapping[str, PositiveInt] = Field(default={}, description="of each request of a tenant")
        priority_factor: float = Field(
            default=2.0, ge=1, le=10, description="so many times the tickets per level of priority (lower is better)"
        )
        seed: int = Field(default=0, description="same seed and same arrivals: same draws")

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, LotteryPolicy(settings))


class LotteryPolicy(Policy):
    """Who comes first. Everything not overridden here is first come, first served: the youngest gives way."""

    def __init__(self, settings: Lottery.Settings):
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._winner: Request | None = None

    def tickets(self, request: Request) -> float:
        own = self._settings.tenant_tickets.get(request.tenant, self._settings.tickets)
        level = max(-MAX_LEVELS, min(request.priority, MAX_LEVELS))
        return float(own) / self._settings.priority_factor**level

    def waiting_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Preempted requests first, as they arrived: they have won already. Then all others, as they are drawn.

        A winner for whom there is no room keeps its place until it runs, or large requests would wait for ever.
        """
        preempted = [request for request in waiting if request.num_preemptions]
        drawn = sorted((request for request in waiting if not request.num_preemptions), key=self._draw)
        self._winner = drawn[0] if drawn else None
        return [*preempted, *drawn]

    def _draw(self, request: Request) -> float:
        """Sorting by these numbers draws ticket after ticket: the smallest of some exponential variables is each one's
        with a chance in proportion to its rate (Efraimidis and Spirakis, 2006)."""
        return -1.0 if request is self._winner else self._random.expovariate(self.tickets(request))
