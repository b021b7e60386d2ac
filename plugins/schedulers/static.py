"""`scheduler: static`: batches that run to completion, the baseline that continuous batching is compared with (R4.6, R17).

A batch is made of those who wait, in order of arrival, as far as there are slots, and blocks for their prompts and all the
tokens that they may generate. These blocks are reserved on admission, so nobody is ever preempted. Nobody joins a batch: when
all of it has ended, the next one is made. `batch_size` makes it a fixed one: it starts with so many requests, or with
fewer once the first of them has waited for `max_wait_s` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from pydantic import Field, model_validator

from core.request import Request, RequestStatus
from core.scheduling.blocks import BlockBudget
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class Static(QueueScheduler):
    class Settings(QueueSettings):
        batch_size: int | None = Field(
            default=None, ge=1, description="requests in a batch; null: as many as there are room for"
        )
        # The engine takes five seconds without a plan, while requests wait, for a fault of the scheduler.
        max_wait_s: float = Field(
            default=0.1, ge=0, le=4, description="seconds that a batch waits to have batch_size requests"
        )

        @model_validator(mode="after")
        def _has_slots(self) -> Static.Settings:
            if self.batch_size is not None and self.batch_size > self.max_num_running_reqs:
                raise ValueError(
                    f"scheduler.batch_size ({self.batch_size}) is more than scheduler.max_num_running_reqs "
                    f"({self.max_num_running_reqs}); lower the first or raise the second"
                )
            return self

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, RunToCompletion(settings, context))


class RunToCompletion(Policy):
    def __init__(self, settings: Static.Settings, context: SchedulerContext):
        self._settings = settings
        self._cache = context.cache
        self._blocks = BlockBudget(context.cache)
        self._clock = context.clock
        self._max_model_len = context.max_model_len
        self._batch: dict[str, Request] = {}  # those of it that have not ended, in order
        self._since: dict[str, float] = {}  # seconds at which a live request came

    def waiting_order(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """The batch takes as many steps to be admitted as its prompts need, by the token budget."""
        if not self._batch and self._is_due(waiting):
            self._batch = {request.request_id: request for request in self._next_batch(waiting)}
        return iter([one for one in self._batch.values() if one.status is not RequestStatus.RUNNING])

    def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        return ()

    def num_reserved(self, request: Request) -> int:
        """The last token is sampled, and never computed."""
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def joined(self, request: Request) -> None:
        self._since.setdefault(request.request_id, request.arrival_time or self._clock())

    def left(self, request: Request) -> None:
        del self._since[request.request_id]
        self._batch.pop(request.request_id, None)

    def _is_due(self, waiting: Sequence[Request]) -> bool:
        size = self._settings.batch_size
        if not waiting or size is None or len(waiting) >= size:
            return bool(waiting)
        return self._clock() - self._since[waiting[0].request_id] >= self._settings.max_wait_s

    def _next_batch(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """The first of all, and those after it for whom there are blocks, whatever they may find in the cache."""
        num_free = self._cache.num_free_blocks
        size = self._settings.batch_size or self._settings.max_num_running_reqs
        for index, request in enumerate(islice(waiting, size)):
            num_free -= self._num_blocks(request)
            if index and num_free < 0:
                return
            yield request

    def _num_blocks(self, request: Request) -> int:
        """That it gets: no more than the whole pool, nor than the model's length."""
        most = min(self._max_model_len, self._blocks.max_positions)
        return self._blocks.num_needed(max(min(self.num_reserved(request), most), request.num_known_tokens))
