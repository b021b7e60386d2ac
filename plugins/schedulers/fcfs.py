"""`scheduler: fcfs`: first come, first served (R4.3).

The oldest running request gets blocks first, at the cost of the youngest; the oldest waiting one is admitted first, and
while it does not fit nobody overtakes it. Exactly the default of every decision in `Policy`.
"""

from __future__ import annotations

from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class Fcfs(QueueScheduler):
    class Settings(QueueSettings):
        pass

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, Policy())
