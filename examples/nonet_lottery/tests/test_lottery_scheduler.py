"""The contract every scheduler keeps. Stays as it is, whatever the policy."""

from core.testing.scheduler import SchedulerContract

from nonet_lottery.lottery import Lottery


class TestLottery(SchedulerContract):
    component = Lottery
