"""Schedulers that each break one promise of `core.stages.scheduler`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from core.batch import SchedulerOutput, Verdict
from core.request import FinishReason, Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import Counts, SchedulerContext


class Wrapped:
    """First come, first served; the bad ones change one thing."""

    class Settings(QueueSettings):
        weights: dict[str, int] = {}

    def __init__(self, settings: Settings, context: SchedulerContext):
        self.settings = settings
        self.context = context
        self.inner = self.make(settings, context)

    def make(self, settings: QueueSettings, context: SchedulerContext) -> QueueScheduler:
        return QueueScheduler(settings, context, Policy())

    def add(self, request: Request) -> None:
        self.inner.add(request)

    def schedule(self) -> SchedulerOutput:
        return self.inner.schedule()

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        return self.inner.update(output, verdicts)

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        return self.inner.finish(request_ids, reason)

    def counts(self) -> Counts:
        return self.inner.counts()


class LeaksBlock(Wrapped):
    """Ends an aborted request, and takes as many blocks for nobody."""

    caught_by = "test_abort_at_any_time"

    def finish(self, request_ids, reason):
        ended = super().finish(request_ids, reason)
        for request in ended:
            ghost = replace(request, request_id=f"ghost of {request.request_id}", block_table=[], block_hashes=[])
            self.context.cache.allocate(ghost, self.context.cache.block_size)
        return ended


class DropsRequest(Wrapped):
    """Every seventh request is never heard of again."""

    caught_by = "test_outputs_are_those_of_a_solo_run"
    number = 0

    def add(self, request):
        self.number += 1
        if self.number % 7:
            super().add(request)


class SchedulesTwice(Wrapped):
    """A request has two parts in one step."""

    caught_by = "test_outputs_are_those_of_a_solo_run"

    def schedule(self):
        output = super().schedule()
        return replace(output, scheduled=(*output.scheduled, *output.scheduled[:1]))


class ExceedsTokens(Wrapped):
    """Plans twice the tokens that a step may have."""

    caught_by = "test_prompts_longer_than_a_step_end"

    def make(self, settings, context):
        more = settings.model_copy(update={"max_num_scheduled_tokens": 2 * settings.max_num_scheduled_tokens})
        return super().make(more, context)


class ExceedsRunning(Wrapped):
    """Runs twice as many requests as it may."""

    caught_by = "test_outputs_are_those_of_a_solo_run"

    def make(self, settings, context):
        more = settings.model_copy(update={"max_num_running_reqs": 2 * settings.max_num_running_reqs})
        return super().make(more, context)


class NewestFirst(Policy):
    def waiting_order(self, waiting):
        return [*(r for r in waiting if r.num_preemptions), *(r for r in waiting[::-1] if not r.num_preemptions)]


class Starves(Wrapped):
    """Last come, first served: while newcomers keep coming, the first ones wait for ever."""

    caught_by = "test_nobody_starves_while_equals_come_and_go"

    def make(self, settings, context):
        return QueueScheduler(settings, context, NewestFirst())


class IgnoresAbort(Wrapped):
    """A client that went away is served to the end."""

    caught_by = "test_abort_at_any_time"

    def finish(self, request_ids, reason):
        return []


class RaisesForUnknown(Wrapped):
    """An abort that crosses the end of its request is an error."""

    caught_by = "test_late_unknown_and_repeated_aborts_are_ignored"

    def finish(self, request_ids, reason):
        ended = super().finish(request_ids, reason)
        if len(ended) < len(request_ids):
            raise KeyError(*request_ids)
        return ended


class ReadsClock(Wrapped):
    """Asks the system for the time."""

    caught_by = "test_no_clock_is_read_but_the_injected_one"

    def schedule(self):
        self.now = time.monotonic()
        return super().schedule()


class ReadsImportedClock(Wrapped):
    """The same, by a name of its own, and where nobody sees the error."""

    caught_by = "test_no_clock_is_read_but_the_injected_one"

    def schedule(self):
        try:
            self.now = perf_counter()
        except Exception:
            self.now = 0.0
        return super().schedule()


class ChangesSettings(Wrapped):
    """Keeps its counts in the settings, which are frozen only at the top."""

    caught_by = "settings_stay_as_they_are"

    def add(self, request):
        weights = self.settings.weights
        weights[request.tenant] = weights.get(request.tenant, 0) + 1
        super().add(request)


class SharesTooEarly(Wrapped):
    """What a step in flight is still to write can be found by others."""

    caught_by = "test_a_chunk_in_flight_is_not_shared_yet"

    def schedule(self):
        output = super().schedule()
        for part in output.scheduled:
            self.context.cache.commit(part.request, part.start + part.num_tokens)
        return output


class LosesPending(Wrapped):
    """Ends a request one token early when a step is in flight."""

    caught_by = "test_ids_in_flight_stop_at_max_tokens"

    def schedule(self):
        output = super().schedule()
        late = tuple(part for part in output.scheduled if part.request.num_pending_tokens > 1)
        for part in late:
            part.request.num_pending_tokens -= 1
            part.request.num_computed_tokens -= part.num_tokens
        return replace(output, scheduled=tuple(part for part in output.scheduled if part not in late))


class Hangs(Wrapped):
    """Never returns from one kind of request."""

    caught_by = "test_prompt_logprobs_get_every_position_computed"

    def add(self, request):
        while request.params.prompt_logprobs is not None:
            time.sleep(0.1)
        super().add(request)


class EndsTheProcess(Wrapped):
    """Takes everybody with it for one kind of request."""

    caught_by = "test_prompt_logprobs_get_every_position_computed"

    def add(self, request):
        if request.params.prompt_logprobs is not None:
            os._exit(3)
        super().add(request)
