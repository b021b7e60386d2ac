"""Stage 4, scheduler: waiting and running requests; token, sequence and block budgets; preemption.

The scheduling rule (idea: vLLM V1): there is no prefill phase and no decode phase. Each request has known tokens and
computed tokens; a step hands out tokens until the second catches up with the first. Chunked prefill, prefix hits,
resumption and speculation fall out of that one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from core.batch import SchedulerOutput, Verdict
from core.cache.kv_cache import KVCache
from core.request import FinishReason, Request
from core.scheduling.swap_cost import SwapCost
from core.stages.decode import Decode
from core.stages.predictor import Predictor
from core.stages.prefill import Prefill


class SchedulerSettings(BaseModel):
    """Limits that every scheduler has (R4.2); a scheduler's `Settings` extends this class."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_num_scheduled_tokens: int = Field(default=2048, ge=1, description="token budget of one step")
    max_num_running_reqs: int = Field(default=64, ge=1, description="sequences in one step")


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    cache: KVCache
    prefill: Prefill  # stage 5: how much of a prompt runs in a step
    decode: Decode  # stage 6: how many tokens a request tries per step
    clock: Callable[[], float]  # monotonic seconds; a scheduler reads no other clock
    max_model_len: int
    swap_cost: SwapCost | None = None  # None: nothing is moved to host memory
    predictor: Predictor | None = None  # how many tokens a request will still generate; None: in a test


class Counts(NamedTuple):
    """Requests in a scheduler; preempted ones count as waiting, or as swapped where their KV is in host memory."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0


class Scheduler(Protocol):
    """Config group `scheduler`. Never touches tensors. Called by the engine loop only, from one thread.

    Of a request it sets status, finish_reason, stop_reason, the counts, draft_token_ids and first_scheduled_time; output is
    added by `Request.append_output` alone, and blocks by the cache. Lists of a request are read only: changing one raises.

    The engine checks each plan and each answer against its own table of requests. What raises, or cannot be, costs the
    request that it concerns; all others are added to a new scheduler over a new cache, their output kept (`add`).

    Example::

        from collections.abc import Sequence

        from core.request import Request
        from core.scheduling.policy import Policy, QueueSettings
        from core.scheduling.queue_scheduler import QueueScheduler
        from core.stages.scheduler import SchedulerContext


        class ShortestFirst(QueueScheduler):  # the methods below, for any policy
            class Settings(QueueSettings):
                pass

            def __init__(self, settings: Settings, context: SchedulerContext):
                super().__init__(settings, context, ByLength())


        class ByLength(Policy):
            def waiting_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
                return sorted(waiting, key=lambda request: request.num_prompt_tokens)
    """

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue. An id that is in flight already is ignored: a repeated message.

        A request may come with output: it was in flight when a scheduler failed. Like a preempted one it has nothing
        computed, and all of its known tokens are to be (`Request.num_known_tokens`).
        """
        ...

    def schedule(self) -> SchedulerOutput:
        """Plan one step and reserve its blocks; advances `num_computed_tokens` of what it planned, whose status is RUNNING.

        Each request at most once, from no later position than its KV is written to, within both limits of its settings.
        `samples` says whether the last known token is among the positions.

        May be called again before `update` of the step before (overlap): positions in flight count as known
        (`Request.num_pending_tokens`).
        """
        ...

    def update(self, output: SchedulerOutput, verdicts: Mapping[str, Verdict]) -> list[Request]:
        """Take in a step's tokens: append the ids that verdicts kept, roll back rejected drafts, end what has ended and free
        its blocks (with `discard` for FinishReason.ERROR: their content may be wrong).

        Returns the requests that ended. A request that was aborted or preempted while the step was in flight is
        skipped (abort) or keeps its tokens (preempted). `output` may be one step old.
        """
        ...

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> list[Request]:
        """End requests from outside (abort, error) and free their blocks. Unknown or ended ids are ignored."""
        ...

    def counts(self) -> Counts:
        """Together, all requests between `add` and their end."""
        ...
