"""`scheduler: time_slice`: round robin. Nobody keeps a place for long while others wait for it.

A request runs for `num_iterations` steps in a row; when its slice is used up it gives way to the first waiting request, where
that fits in its place, and goes to the end of the queue. While nobody waits it runs on. So a short request waits for slices
of the long ones, not for their ends (round robin over iterations; idea: time-slicing of operating systems, and FastServe for
language models, which adds levels).

Bound: with others waiting, a request runs for `num_iterations` steps in a row, or for as many as its first `min_tokens` new
tokens take when that is longer: a prompt in chunks, or one that is computed again, is not thrown away before it has brought
something. So each turn ends with new tokens, and all requests end. Raise `min_tokens` where preempted requests are computed
again rather than swapped: a turn of k steps that repeats p steps of prompt wastes p / k.

A request that loses its blocks before its slice is used up (KV ran out) keeps its place in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.scheduler import SchedulerContext


class TimeSlice(QueueScheduler):
    class Settings(QueueSettings):
        num_iterations: int = Field(
            default=10, ge=1, description="steps in a row that a request runs while others wait"
        )
        min_tokens: int = Field(default=1, ge=1, description="new tokens that a slice brings, however long they take")

    def __init__(self, settings: Settings, context: SchedulerContext):
        super().__init__(settings, context, RoundRobin(settings.num_iterations, settings.min_tokens))


@dataclass(slots=True)
class Turn:
    """A request's place in the round, and what it has had of its slice."""

    number: int  # of all turns, in the order in which they were queued for
    iterations: int = 0  # steps since it was admitted
    goal: int = 0  # output tokens with which its slice may end


class RoundRobin(Policy):
    displaces_alike = True
    counts_steps = True

    def __init__(self, num_iterations: int, min_tokens: int):
        self._num_iterations = num_iterations
        self._min_tokens = min_tokens
        self._num_turns = 0
        self._turns: dict[str, Turn] = {}  # of live requests, by id

    def rank(self, request: Request) -> int:
        return self._turns[request.request_id].number

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        return [request for request in running if self._is_used_up(request)]

    def joined(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING or self._is_used_up(request):
            self._num_turns += 1
            self._turns[request.request_id] = Turn(self._num_turns)

    def started(self, request: Request) -> None:
        turn = self._turns[request.request_id]
        turn.iterations, turn.goal = 0, request.num_output_tokens + self._min_tokens

    def planned(self, output: SchedulerOutput) -> None:
        turns = self._turns
        for part in output.scheduled:
            turns[part.request.request_id].iterations += 1

    def left(self, request: Request) -> None:
        del self._turns[request.request_id]

    def _is_used_up(self, request: Request) -> bool:
        turn = self._turns[request.request_id]
        if turn.iterations < self._num_iterations:
            return False
        return request.num_output_tokens + request.num_pending_tokens >= turn.goal
