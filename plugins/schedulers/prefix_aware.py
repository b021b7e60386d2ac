"""`scheduler: prefix_aware`: whose prompt is cached furthest goes first, so that a prefix is used while it is there.

Of the first `window` waiting requests, the one with the longest cached prefix is tried first, equals by arrival; those behind
them come after, `window` by `window`. A request that has waited for `max_wait_s` seconds goes before all that have not, in
order of arrival: so each is overtaken only by those that came within `max_wait_s` after it. (Idea: cache-aware scheduling
in SGLang, Zheng et al., 2024; the age bound is ours: the longest prefix alone starves prompts that nobody shares.)

The cache is asked once for a request, and again after `memory_steps` steps, a few requests per step. A preempted request
counts as cached whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from core.batch import SchedulerOutput
from core.cache.kv_cache import KVCache
from core.request import Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class PrefixAware(QueueScheduler):
    class Settings(QueueSettings):
        window: int = Field(default=32, ge=1, le=4096, description="waiting requests that are compared")
        max_wait_s: float = Field(
            default=10.0, ge=0, le=3600, description="seconds after which a request waits for nobody who came later"
        )
        memory_steps: int = Field(
            default=16, ge=1, le=1024, description="steps for which an answer of the cache is kept"
        )

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, LongestPrefix(settings, context.cache, context.clock))


@dataclass(slots=True)
class Wait:
    """Of one request."""

    since: float  # seconds: its arrival, by the scheduler's clock
    num_cached: int = 0  # tokens
    asked_in: int | None = None  # step


class LongestPrefix(Policy):
    """Asks for at most `window` prefixes per step, unless it admits more requests than that."""

    def __init__(self, settings: PrefixAware.Settings, cache: KVCache, clock: Callable[[], float]):
        self._settings = settings
        self._cache = cache
        self._clock = clock
        self._step = 0
        self._most_again = -(-settings.window // settings.memory_steps)  # so that steps cost the same
        self._num_again = 0  # asked in this step
        self._waits: dict[str, Wait] = {}

    def waiting_order(self, waiting: Sequence[Request]) -> Iterator[Request]:
        num_overdue, latest = 0, self._clock() - self._settings.max_wait_s
        for (
            request
        ) in waiting:  # in order of `add`, which is that of arrival but for those that were rendered for longer
            if self._waits[request.request_id].since > latest:
                break
            num_overdue += 1
            yield request
        size = self._settings.window
        for start in range(num_overdue, len(waiting), size):
            yield from sorted(waiting[start : start + size], key=self._num_cached, reverse=True)

    def joined(self, request: Request) -> None:
        wait = self._waits.get(request.request_id)
        if wait is None:
            # Not the time of `add`: after a recovery all are added anew, and have waited all the same.
            wait = self._waits[request.request_id] = Wait(request.arrival_time or self._clock())
        wait.asked_in = None

    def planned(self, output: SchedulerOutput) -> None:
        self._step += 1
        self._num_again = 0

    def left(self, request: Request) -> None:
        del self._waits[request.request_id]

    def _num_cached(self, request: Request) -> int:
        if request.num_preemptions:
            return request.num_tokens
        wait = self._waits[request.request_id]
        if wait.asked_in is None:
            wait.num_cached, wait.asked_in = self._cache.peek(request), self._step
        elif self._num_again < self._most_again and self._step - wait.asked_in >= self._settings.memory_steps:
            self._num_again += 1
            wait.num_cached, wait.asked_in = self._cache.peek(request), self._step
        return wait.num_cached
