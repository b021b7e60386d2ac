"""The contract every scheduler keeps. Stays as it is, whatever the policy."""

from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.fakes import Limits
from core.testing.scheduler import SchedulerContract

from nonet_lottery.lottery import Lottery


class TestLottery(SchedulerContract):
    def make_scheduler(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        tokens, reqs = limits.max_num_scheduled_tokens, limits.max_num_running_reqs
        settings = Lottery.Settings(max_num_scheduled_tokens=tokens, max_num_running_reqs=reqs)
        return Lottery(settings, context)
