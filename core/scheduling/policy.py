"""What a scheduling policy decides, and the settings that every policy has. The mechanism is `queue_scheduler`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from core.batch import SchedulerOutput
from core.request import Request
from core.stages.scheduler import SchedulerSettings


class QueueSettings(SchedulerSettings):
    """Limits of a step (R4.2). Free KV blocks are the third limit; the cache knows them."""

    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of the KV of a preempted request; auto: moved to host memory where that is cheaper",
    )

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
    """Who comes first and who gives way. The lists handed in are not to be changed.

    Requests stand in both queues by `rank`, lowest first, and by order of `add` among equals. The methods here are first
    come, first served without displacement; a policy overrides what it decides otherwise.
    """

    head_of_line = True  # a waiting request that does not fit holds back those after it
    displaces_alike = False  # True: `displaced_by` is the same for every head, and is asked for once per step
    counts_steps = (
        False  # True: what it decides depends on how many steps there were; a simulation gives it each of them
    )

    def rank(self, request: Request) -> Any:
        """Where the request stands: anything that can be compared. Asked each time it joins a queue (waiting when it is added
        or preempted, running when it is admitted) and kept while it is there."""
        return 0

    def waiting_order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """The order in which waiting requests are tried. Read only as far as there is room, so a generator is welcome."""
        return waiting

    def running_order(self, running: Sequence[Request]) -> Sequence[Request]:
        """The order in which running requests get tokens and blocks."""
        return running

    def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Running requests that give way when running `request` lacks a block, first choice first: those after it.

        Must be a strict order among requests: never a for b and b for a, or two of them preempt each other in turn.
        """
        return running[: running.index(request) : -1]

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Running requests that give way to waiting `head` when it lacks a slot or blocks, first choice first.

        Asked for one waiting request after the other, in their order, until one finds none. Whoever is displaced must
        stand after `head` from then on.
        """
        return ()

    def num_reserved(self, request: Request) -> int:
        """Positions whose blocks a request gets when it is admitted; at least those of its known tokens."""
        return request.num_known_tokens

    def joined(self, request: Request) -> None:
        """Told of each request that joins waiting: new (status WAITING) or preempted. Before its rank is asked for."""

    def started(self, request: Request) -> None:
        """Told of each request that is admitted. Before its rank is asked for."""

    def planned(self, output: SchedulerOutput) -> None:
        """Told of each step, for policies that count (slices, shares)."""

    def left(self, request: Request) -> None:
        """Told of each request that has ended, from whichever queue (`status` says how)."""
