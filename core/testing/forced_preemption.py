"""A scheduler that preempts on a schedule, whether blocks lack or not: what is rare under real load becomes the rule in a test.

As SGLang's tests do with forced retraction; the victim is drawn at random.
"""

from __future__ import annotations

import random
from dataclasses import replace

from pydantic import Field

from core.batch import SchedulerOutput
from core.request import Request
from core.scheduling.plan import Plan, in_prompt
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class ForcedPreemption(QueueScheduler):
    """First come, first served, and a random running request gives way every few steps.

    A victim has got a token since it was admitted, so that everyone comes to an end.
    """

    class Settings(QueueSettings):
        preempt_every: int = Field(default=3, ge=1, description="steps")
        preempt_seed: int = 0

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, Policy())
        self._every = settings.preempt_every
        self._draw = random.Random(settings.preempt_seed)

    def schedule(self) -> SchedulerOutput:
        forced = self._forced()
        output = super().schedule()
        return replace(output, preempted=(*forced, *output.preempted))

    def _forced(self) -> list[Request]:
        step = self._step + 1  # the one that is about to be planned
        candidates = [request for request in self._queues.running if not in_prompt(request)]
        if step % self._every or not candidates:
            return []
        plan = Plan(step, 0)
        self._preempt([self._draw.choice(candidates)], plan)
        return plan.preempted
