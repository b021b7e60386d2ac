"""Records of the shared scheduling mechanism: the step being planned, and what is known of a request beside its record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from core.batch import ScheduledRequest
from core.request import Request, RequestStatus

RUNNING = RequestStatus.RUNNING  # an enum's attribute costs as much as a call


@dataclass(slots=True, eq=False)
class Entry:
    """What the scheduler knows of a request beside its record."""

    request: Request
    order: int  # of `add`
    key: tuple[Any, int] = (0, 0)  # (rank, order) among the waiting
    running_key: tuple[Any, int] = (0, 0)  # among the running
    limit: int = 0  # a plain decode below this position needs no block and no look; 0 while in the prompt
    forced: bool = (
        False  # a grammar gave it ids beyond the sampled one: no prompt, though several tokens are to be computed
    )
    num_cached_first: int = 0  # prefix hit of the first admission
    preempted_step: int = 0  # parts of earlier steps that are still in flight lost their blocks
    was_swapped: bool = False  # when it was started last


class Trial(Enum):
    """What became of a waiting request that was tried."""

    STARTED = auto()
    REFUSED = auto()  # it can never run
    WAITS = auto()  # for a slot, blocks or budget, which those behind it must not take
    PASSED = auto()  # its prompt is held back by stage 5: no matter of those behind it


@dataclass(slots=True)
class Plan:
    """The step that is being planned."""

    step: int
    token_budget: int
    num_to_plan: int = 0  # running requests that have not had their turn
    parts: list[ScheduledRequest] = field(default_factory=list)
    planned_ids: set[str] = field(default_factory=set)  # but for plain decodes, which come last among the decodes
    preempted: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)  # can never run, or came too late
    stalled: list[Request] = field(default_factory=list)  # running, but without blocks in this step
    admits: bool = True  # False: what is left over is owed to a running or a just preempted request

    def unplanned(self, victims: Iterable[Request]) -> Iterator[Request]:
        """Not a list: nearly always the first is enough. One that has given way to an earlier head has nothing to give."""
        return (one for one in victims if one.status is RUNNING and one.request_id not in self.planned_ids)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why the last admission failed; spares a long prompt at the head its prefix lookup in each step."""

    request: Request
    num_free_blocks: int
    num_running: int

    def still(self, request: Request, num_free_blocks: int, num_running: int) -> bool:
        same = request is self.request and num_running >= self.num_running > 0
        return same and num_free_blocks <= self.num_free_blocks


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Displacing all victims would not have made room for a waiting request. What they grow by only comes off what is free."""

    request: Request
    num_victims: int
    num_free_blocks: int

    def still(self, request: Request, num_victims: int, num_free_blocks: int) -> bool:
        same = request is self.request and num_victims <= self.num_victims
        return same and num_free_blocks <= self.num_free_blocks


def in_prompt(request: Request) -> bool:
    """Still to be computed up to its last known token: a prompt, or a preempted request's prompt and output."""
    computed, num_prompt = request.num_computed_tokens, len(request.prompt_token_ids)
    return computed < num_prompt or computed < num_prompt + len(request.output_token_ids) - 1


def num_equal(kept: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts hold: KV was written for them. What a grammar forces may follow, so the number kept does not say it."""
    count = 0
    for token_id, draft in zip(kept, drafts, strict=False):
        if token_id != draft:
            break
        count += 1
    return count
