"""Grammars that wait to be compiled: tenants take turns, and one that fills the queue makes room for others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from core.errors import OverloadedError
from core.grammar.compile_worker import Answer
from core.request import GrammarSpec


@dataclass(slots=True, eq=False)
class Job:
    spec: GrammarSpec
    backends: Sequence[str]
    timeout_s: float  # for all of these backends
    tenant: str = ""
    answer: Future[Answer] = field(default_factory=Future)


class WaitingJobs:
    """At most `max_jobs`, in the order in which they come, tenant by tenant. Not for several threads at once."""

    def __init__(self, max_jobs: int):
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._of: OrderedDict[str, deque[Job]] = OrderedDict()  # none is empty; the first has its turn

    def __len__(self) -> int:
        return self._num_jobs

    def add(self, job: Job) -> None:
        """Raises OverloadedError where all places are taken, and none by a tenant that has more than this one would."""
        if self._num_jobs >= self._max_jobs:
            self._drop_cancelled()
        if self._num_jobs >= self._max_jobs:
            self._make_room(job.tenant)
        self._of.setdefault(job.tenant, deque()).append(job)
        self._num_jobs += 1

    def take(self) -> Job:
        """The next one. Raises IndexError where none is left."""
        if not self._of:
            raise IndexError("no grammar waits")
        tenant, jobs = next(iter(self._of.items()))
        job = jobs.popleft()
        self._num_jobs -= 1
        if jobs:
            self._of.move_to_end(tenant)
        else:
            del self._of[tenant]
        return job

    def take_all(self) -> list[Job]:
        return [self.take() for _ in range(self._num_jobs)]

    def _drop_cancelled(self) -> None:
        kept = ((tenant, deque(job for job in jobs if not job.answer.cancelled())) for tenant, jobs in self._of.items())
        self._of = OrderedDict((tenant, jobs) for tenant, jobs in kept if jobs)
        self._num_jobs = sum(map(len, self._of.values()))

    def _make_room(self, tenant: str) -> None:
        """The newest one of whoever has most gives way, where `tenant` then still has no more than that."""
        most = max(self._of, key=lambda each: len(self._of[each]), default=tenant)
        if len(self._of.get(most, ())) <= len(self._of.get(tenant, ())) + 1:
            raise _full(self._num_jobs)
        job = self._of[most].pop()  # more than one: it is not left empty
        self._num_jobs -= 1
        if job.answer.set_running_or_notify_cancel():
            job.answer.set_exception(_full(self._max_jobs))


def _full(num_jobs: int) -> OverloadedError:
    return OverloadedError(f"{num_jobs} grammars wait to be compiled; try again later")
