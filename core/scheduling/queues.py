"""The two queues of a scheduler: every request is in exactly one of them, at the place where it was added."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from core.request import Request, RequestStatus
from core.scheduling.plan import Entry


class Queues:
    """`waiting` and `running` in order of `add`; a preempted request returns to its old place, never behind a newcomer.

    Invariant: `running` holds exactly the requests that hold blocks. The lists are read by all, and changed here only.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []  # preempted ones included
        self.running: list[Request] = []
        self._entries: dict[str, Entry] = {}
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def entry(self, request: Request) -> Entry:
        return self._entries[request.request_id]

    def find(self, request_ids: Sequence[str]) -> list[Request]:
        """The live requests among the ids, each once."""
        return [self._requests[key] for key in dict.fromkeys(request_ids) if key in self._requests]

    def add(self, request: Request) -> None:
        self._num_added += 1
        self._entries[request.request_id] = Entry(order=self._num_added)
        self._requests[request.request_id] = request
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self.waiting.remove(request)
        insort(self.running, request, key=self._order)
        request.status = RequestStatus.RUNNING

    def preempt(self, request: Request) -> None:
        """From running to waiting."""
        self.running.remove(request)
        insort(self.waiting, request, key=self._order)
        request.status = RequestStatus.PREEMPTED

    def remove(self, request: Request) -> None:
        """Forget a request, whichever queue it is in. Its status must still say which."""
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self._entries[request.request_id], self._requests[request.request_id]

    def _order(self, request: Request) -> int:
        return self._entries[request.request_id].order
