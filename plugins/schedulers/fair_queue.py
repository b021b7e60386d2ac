"""Requests that wait in the queues of accounts (tenants, or tiers), next that of the account with the smallest counter.

A counter grows by what an account costs over its weight. An account that comes back to wait is lifted to the smallest
counter among those who do, so that nobody saves up for a burst (VTC: Sheng et al., OSDI'24; in networks: start-time fair
queueing). A pick costs O(log n) among the accounts that wait. An account without requests is kept only while it is ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from sortedcontainers import SortedDict

from core.request import Request


@dataclass(slots=True, eq=False)
class Account:
    """`key`: of its entry in the heap of those who wait, at most its counter."""

    name: str
    order: int  # settles ties
    weight: float
    counter: float = 0.0
    num_running: int = 0
    waiting: SortedDict[int, Request] = field(default_factory=SortedDict)  # by order of arrival
    key: float | None = None
    is_listed: bool = False  # among the idle

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running


Heap = list[tuple[float, int, Account]]


class FairQueue:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._heap: Heap = []  # of those who wait; entries may be out of date
        self._idle: Heap = []  # without requests, and ahead of those who wait
        self._last: Account | None = None  # to leave off waiting
        self._num_made = 0

    def account(self, name: str, weight: float) -> Account:
        found = self.accounts.get(name)
        if found is None:
            self._num_made += 1
            found = self.accounts[name] = Account(name, self._num_made, weight)
        return found

    def charge(self, account: Account, cost: float) -> None:
        """A negative one gives back."""
        account.counter += cost / account.weight
        if account.key is not None and account.counter < account.key:
            self._push(account)

    def add(self, account: Account, order: int, request: Request) -> None:
        if not account.waiting:
            account.counter = max(account.counter, self.level())
            if account.key is None:
                self._push(account)
        account.waiting[order] = request

    def remove(self, account: Account, order: int) -> None:
        del account.waiting[order]
        if not account.waiting:
            self._last = account

    def level(self) -> float:
        """The smallest counter of those who wait; where nobody does, that of the last who did."""
        first = self.first() or self._last
        return 0.0 if first is None else first.counter

    def first(self) -> Account | None:
        """Counters grow without a word to the heap: what comes to its top is looked at again."""
        while self._heap:
            key, order, account = self._heap[0]
            if key != account.key:
                heappop(self._heap)
            elif not account.waiting:
                heappop(self._heap)
                account.key = None
            elif account.counter > key:
                account.key = account.counter
                heapreplace(self._heap, (account.counter, order, account))
            else:
                return account
        return None

    def in_order(self) -> Iterator[Request]:
        """Read while requests are removed and accounts are charged; one that is not removed makes way for the next."""
        while (account := self.first()) is not None:
            order, request = account.waiting.peekitem(0)
            yield request
            if account.waiting.get(order) is request:
                yield from self._after(account, order)
                return

    def settle(self, account: Account) -> None:
        """It has one request less. An account that is not ahead would be lifted to where it is: nothing need be kept."""
        if account.is_idle and not account.is_listed:
            account.is_listed = True
            heappush(self._idle, (account.counter, account.order, account))
        level = self.level() if self._idle else 0.0
        while self._idle and self._idle[0][0] <= level:
            account = heappop(self._idle)[2]
            account.is_listed = account.is_idle and account.counter > level
            if account.is_listed:
                heappush(self._idle, (account.counter, account.order, account))
            elif account.is_idle:
                del self.accounts[account.name]

    def clear(self) -> None:
        """No request is left: nobody was held back, and nobody is owed anything."""
        self.accounts, self._heap, self._idle, self._last = {}, [], [], None

    def _push(self, account: Account) -> None:
        account.key = account.counter
        heappush(self._heap, (account.counter, account.order, account))

    def _after(self, passed: Account, order: int) -> Iterator[Request]:
        """All who wait, but the requests of `passed` up to `order`."""
        after = {passed: order}
        heap = [(account.counter, account.order, account) for account in self.accounts.values() if account.waiting]
        heapify(heap)
        while heap:
            account = heap[0][2]
            found = next(account.waiting.irange(after.get(account, 0), inclusive=(False, True)), None)
            if found is None:
                heappop(heap)
                continue
            after[account] = found
            yield account.waiting[found]
            heapreplace(heap, (account.counter, account.order, account))
