"""Records have monotonic seconds, which mean nothing elsewhere. Here they become times of day."""

from __future__ import annotations

import time

NS = 1_000_000_000


class WallClock:
    """Reads how far apart the two clocks are once per record: the clock of the day may be set while a server runs, and
    spans of one record must not be torn apart."""

    def __init__(self) -> None:
        self._apart = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic: float) -> int:
        """Nanoseconds since 1970, never negative."""
        return max(self._apart + int(monotonic * NS), 0)

    def seconds(self, monotonic: float) -> float:
        """Seconds since 1970, to the microsecond."""
        return round(self.ns(monotonic) / NS, 6)
