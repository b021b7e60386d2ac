"""Requests that wait for their first step, by deadline."""

from __future__ import annotations

from heapq import heappop, heappush

from core.request import Request


class Expiry:
    """A heap of deadlines. What has been scheduled or has ended since stays in it until its time comes, or until a thousand
    more have come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0  # settles ties

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is not None and request.first_scheduled_time is None:
            self._num_added += 1
            heappush(self._heap, (request.deadline, self._num_added, request))
            if self._num_added % 1024 == 0:  # far deadlines of what has ended would pile up
                self._heap = [entry for entry in self._heap if _is_due(entry[2])]
                self._heap.sort()

    def pop_due(self, now: float) -> list[Request]:
        """Those that are past their deadline and have never been scheduled."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if _is_due(request):
                due.append(request)
        return due


def _is_due(request: Request) -> bool:
    return request.first_scheduled_time is None and not request.is_finished
