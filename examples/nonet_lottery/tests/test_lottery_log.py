"""The contract every observer keeps. Delete it with `request_log.py` if you observe nothing."""

from core.testing.observer import ObserverContract

from nonet_lottery.request_log import LotteryLog


class TestLotteryLog(ObserverContract):
    component = LotteryLog
