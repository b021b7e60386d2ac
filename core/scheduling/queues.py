"""The two queues of a scheduler: every request is in exactly one of them, at the place that its rank gives it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from sortedcontainers import SortedKeyList

from core.request import Request, RequestStatus
from core.scheduling.plan import Entry
from core.scheduling.policy import Policy


class Queues:
    """`waiting` and `running` in order of (rank, order of `add`): a preempted request of equal rank returns to its old place,
    never behind a newcomer.

    Invariant: `running` holds exactly the requests that hold blocks. The lists are read by all, and changed here only.
    Joining and leaving cost O(log n) among the waiting, and a move of pointers among the running.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        self._entries: dict[str, Entry] = {}
        self._num_added = 0
        self.waiting: SortedKeyList[Request, tuple[object, int]] = SortedKeyList(
            key=self._key_of
        )  # preempted ones, too
        self.running: list[Request] = []
        self.lanes: list[Entry] = []  # of `running`, in the same order
        self.num_swapped = 0  # of `waiting`

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entry(self, request: Request) -> Entry:
        return self._entries[request.request_id]

    def find(self, request_ids: Sequence[str]) -> list[Request]:
        """The live requests among the ids, each once."""
        return [self._entries[key].request for key in dict.fromkeys(request_ids) if key in self._entries]

    def get(self, request_id: str) -> Request | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def add(self, request: Request) -> None:
        self._num_added += 1
        self._entries[request.request_id] = Entry(request, order=self._num_added)
        self._join(request, RequestStatus.WAITING)

    def start(self, request: Request) -> None:
        """To running. It stays in `waiting` until `settle`: the order in which requests are tried is still being read."""
        entry = self.entry(request)
        entry.was_swapped = request.status is RequestStatus.SWAPPED
        request.status = RequestStatus.RUNNING
        self._policy.started(request)
        entry.running_key = (self._policy.rank(request), entry.order)
        insort(self.lanes, entry, key=_running_key)
        self.running.insert(self.lanes.index(entry), request)

    def settle(self, started: Iterable[Request]) -> None:
        for request in started:
            self.waiting.remove(request)
            self.num_swapped -= self.entry(request).was_swapped

    def preempt(self, request: Request, status: RequestStatus) -> None:
        """From running to waiting, as PREEMPTED or SWAPPED."""
        self._leave_running(request)
        self._join(request, status)

    def remove(self, request: Request) -> None:
        """Forget a request, whichever queue it is in. Its status must still say which."""
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self.waiting.remove(request)
            self.num_swapped -= request.status is RequestStatus.SWAPPED
        del self._entries[request.request_id]

    def _join(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.num_swapped += status is RequestStatus.SWAPPED
        entry = self.entry(request)
        self._policy.joined(request)
        entry.key = (self._policy.rank(request), entry.order)
        self.waiting.add(request)

    def _leave_running(self, request: Request) -> None:
        index = self.running.index(request)
        del self.running[index], self.lanes[index]

    def _key_of(self, request: Request) -> tuple[object, int]:
        return self._entries[request.request_id].key


def _running_key(entry: Entry) -> tuple[object, int]:
    return entry.running_key
