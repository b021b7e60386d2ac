"""The queue of `fair` picks as one that looks at every account each time, and forgets what makes no difference."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.request import Request
from core.testing.fakes import make_request
from plugins.schedulers.fair_queue import FairQueue

NAMES = "abcde"


@dataclass
class Plain:
    """The slow twin: forgets nothing, and compares all."""

    counters: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in NAMES})
    last: str | None = None

    def level(self) -> float:
        backlogged = [self.counters[name] for name in NAMES if self.waiting[name]]
        return min(backlogged, default=self.counters.get(self.last or "", 0.0))

    def add(self, name: str, order: int) -> None:
        if not self.waiting[name]:
            self.counters[name] = max(self.counters.get(name, 0.0), self.level())
        self.waiting[name] = sorted([*self.waiting[name], order])

    def remove(self, name: str, order: int) -> None:
        self.waiting[name].remove(order)
        if not self.waiting[name]:
            self.last = name


class QueueMachine(RuleBasedStateMachine):
    """Charges are whole numbers, so that counters are exact. Ties are broken by the queue, so counters are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.plain = FairQueue(), Plain()
        self.owners: dict[int, str] = {}  # of waiting requests, by order
        self.running: list[str] = []
        self.num_added = 0

    def account(self, name: str):
        return self.queue.account(name, 1.0)

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        self.num_added += 1
        self.queue.add(self.account(name), self.num_added, request(self.num_added))
        self.plain.add(name, self.num_added)
        self.owners[self.num_added] = name

    @precondition(lambda self: self.owners)
    @rule(cost=st.integers(0, 9))
    def pick(self, cost: int) -> None:
        first = next(iter(self.queue.in_order()))
        order = int(first.request_id)
        name = self.owners.pop(order)
        assert self.plain.counters[name] == self.plain.level()
        assert order == self.plain.waiting[name][0]
        self.queue.remove(self.account(name), order)
        self.plain.remove(name, order)
        self.account(name).num_running += 1
        self.running.append(name)
        self.charge(name, cost)

    def charge(self, name: str, cost: int) -> None:
        self.queue.charge(self.account(name), cost)
        self.plain.counters[name] += cost

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cost=st.integers(0, 9))
    def output(self, data: st.DataObject, cost: int) -> None:
        self.charge(data.draw(st.sampled_from(self.running)), cost)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(sorted(self.owners)))
        name = self.owners.pop(order)
        self.queue.remove(self.account(name), order)
        self.plain.remove(name, order)
        self.end(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.account(name).num_running -= 1
        self.end(name)

    def end(self, name: str) -> None:
        if self.owners or self.running:
            self.queue.settle(self.account(name))
        else:
            self.queue.clear()
            self.plain = Plain()

    @invariant()
    def all_who_wait_come_in_order(self) -> None:
        """None is removed while it is read: the slow way through all of them."""
        found = [int(one.request_id) for one in self.queue.in_order()]
        assert sorted(found) == sorted(self.owners)
        for name in NAMES:
            assert [order for order in found if self.owners[order] == name] == self.plain.waiting[name]
        counters = [self.plain.counters[self.owners[order]] for order in found]
        assert counters == sorted(counters)
        assert self.queue.level() == self.plain.level()

    @invariant()
    def only_leads_are_kept(self) -> None:
        level = self.plain.level()
        for name, account in self.queue.accounts.items():
            assert account.counter == self.plain.counters[name]
            assert not account.is_idle or account.is_listed
        for name in NAMES:
            if name not in self.queue.accounts:
                assert self.plain.counters.get(name, 0.0) <= level
        assert len(self.queue._idle) <= len(self.queue.accounts)


def request(order: int) -> Request:
    return make_request(str(order), [1])


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_what_is_given_back_counts_at_once() -> None:
    """A counter that shrinks is found although the heap has seen it larger."""
    queue = FairQueue()
    a, b = queue.account("a", 1.0), queue.account("b", 2.0)
    for order, account in enumerate((a, b, a, b)):
        queue.add(account, order, request(order))
    queue.charge(a, 10)
    queue.charge(b, 10)
    assert queue.first() is b and b.counter == 5
    queue.charge(a, -8)
    assert queue.first() is a and a.counter == 2
    queue.charge(a, 8)
    assert queue.first() is b
