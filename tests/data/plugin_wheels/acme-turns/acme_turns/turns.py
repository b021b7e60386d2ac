from collections.abc import Sequence

from core.request import Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class Turns(QueueScheduler):
    class Settings(QueueSettings):
        pass

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, NewestFirst())


class NewestFirst(Policy):
    def waiting_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: request.arrival_time, reverse=True)
