"""What a scheduling policy decides, and the settings that every policy has. The mechanism is `queue_scheduler`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import model_validator

from core.batch import SchedulerOutput
from core.request import Request
from core.stages.scheduler import SchedulerSettings


class QueueSettings(SchedulerSettings):
    """Limits of a step (R4.2). Free KV blocks are the third limit; the cache knows them."""

    @model_validator(mode="after")
    def _one_token_each(self) -> QueueSettings:
        if self.max_num_running_reqs > self.max_num_scheduled_tokens:
            raise ValueError(
                f"scheduler.max_num_running_reqs ({self.max_num_running_reqs}) is more than "
                f"scheduler.max_num_scheduled_tokens ({self.max_num_scheduled_tokens}): each running request needs "
                "one token per step; raise the second or lower the first"
            )
        return self


class Policy:
    """Who comes first and who gives way. The lists handed in are in order of `add`; they are not to be changed.

    The methods here are first come, first served without displacement; a policy overrides what it decides otherwise.
    """

    head_of_line = True  # a waiting request that does not fit holds back those after it

    def waiting_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The order in which waiting requests are tried."""
        return waiting

    def running_order(self, running: Sequence[Request]) -> Sequence[Request]:
        """The order in which running requests get tokens and blocks."""
        return running

    def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Running requests that give way when running `request` lacks a block, first choice first.

        Must be a strict order among requests: never a for b and b for a, or two of them preempt each other in turn.
        """
        return running[: running.index(request) : -1]

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Running requests that give way to waiting `head` when it lacks a slot or blocks, first choice first."""
        return ()

    def planned(self, output: SchedulerOutput) -> None:
        """Told of each step, for policies that count (slices, shares)."""

    def left(self, request: Request) -> None:
        """Told of each request that has ended."""
