"""Requests that wait for their first step, by deadline."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from core.request import Request

SWEEP = 1024  # additions between two looks for what has ended since


class Expiry:
    """A heap of deadlines and ids: a request that has ended is not kept for it."""

    def __init__(self, find: Callable[[str], Request | None]) -> None:
        """`find` gives a request in flight by its id."""
        self._find = find
        self._heap: list[tuple[float, str]] = []
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is None or request.first_scheduled_time is not None:
            return
        heappush(self._heap, (request.deadline, request.request_id))
        self._num_added += 1
        if self._num_added % SWEEP == 0:  # far deadlines of what has ended would pile up
            self._heap = [entry for entry in self._heap if self._waiting(*entry)]
            heapify(self._heap)

    def pop_due(self, now: float) -> list[Request]:
        """Those that are past their deadline and have never been scheduled."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            request = self._waiting(*heappop(self._heap))
            if request is not None:
                due.append(request)
        return due

    def _waiting(self, deadline: float, request_id: str) -> Request | None:
        """None: it has been scheduled or has ended, and its id may be another request's."""
        request = self._find(request_id)
        if request is None or request.deadline != deadline or request.first_scheduled_time is not None:
            return None
        return request
