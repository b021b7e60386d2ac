"""`scheduler: srtf`: shortest remaining time first, with aging; the longest running request gives way to a much shorter one.

The work of a request is what is left of it, in tokens of output: those that `predictor` expects still to come, and
`prompt_weight` for each token that is known and not computed. It stands at

    work + aging * arrival_time

and the lowest goes first, in waiting as for blocks. All age alike, so the order of two waiting requests never changes.

Bound: no request is overtaken by one that arrives `work / aging` seconds or more after it, work being the most that was
expected of it: at most its max_tokens, and `prompt_weight` for each token of its context. With `aging` 0 there is no bound.

A waiting request displaces a running one only where that gains: it would start anyway when the first of the running ones ends,
so it must be shorter than what is left of that one, by more than `margin` and what all that wait then wait for, the preempted
one's KV. In a large batch somebody ends soon, and that is rare. The displaced one stood after the other and stays there, so two
never push each other out in turn: what is expected of a request changes only when it has got tokens. When running requests lack
blocks, the one that stands last gives way first, and only to those before it: at any time that is a strict order.

The predictor is told of each request that ends by itself, and asked again about running ones while their tokens come: one that
goes on past what was expected is likely to go on for long (idea: Shahout et al. 2024, TRAIL). Shortest remaining first has the
least mean latency of all policies on one server (Schrage 1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from core.batch import SchedulerOutput
from core.request import FinishReason, Request, RequestStatus
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.predictor import MaxTokens, Predictor, PredictorContext
from core.stages.scheduler import SchedulerContext

MIN_TOKENS = 8  # of output, before the predictor is asked again about a running request
FIRST_TOKENS = 64  # of output, after which it is asked for the first time again at the latest
LEAST_ASKED = 16  # times in a step; what is not asked in time stays as it was expected
LOOK_AGAIN = 8  # steps after which a waiting request that found nobody to displace looks again

BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class Srtf(QueueScheduler):
    class Settings(QueueSettings):
        prompt_weight: float = Field(
            default=0.3,
            ge=0,
            allow_inf_nan=False,
            description="what a token of a prompt costs, against one of output in a full batch",
        )
        aging: float = Field(
            default=5.0,
            ge=0,
            allow_inf_nan=False,
            description="tokens of work that a second of waiting makes up for; 0: long requests may wait for ever",
        )
        margin: float = Field(
            default=32.0,
            ge=0,
            allow_inf_nan=False,
            description="tokens of work that displacing a running request must gain, beyond what it costs",
        )

    def __init__(self, settings: Settings, context: SchedulerContext):
        predictor = context.predictor or MaxTokens(MaxTokens.Settings(), PredictorContext(context.max_model_len))
        super().__init__(settings, context, ByRemaining(settings, predictor, loss_weight(settings, context)))


def loss_weight(settings: Srtf.Settings, context: SchedulerContext) -> float:
    """What preempting a request costs for each token that it has computed: `prompt_weight`, or less where its KV can be moved to
    host memory and back for less than computing it takes."""
    cost = context.swap_cost
    if cost is None or settings.preemption == "recompute":
        return settings.prompt_weight
    prefill_s = cost.prefill_s_per_token * context.cache.block_size
    swap_s = 2 * cost.copy_s_per_block
    return settings.prompt_weight * (swap_s / prefill_s if swap_s < prefill_s else 1.0)


@dataclass(slots=True)
class Estimate:
    """What the predictor said of a request."""

    left: float  # tokens
    num_output_tokens: int  # that it had then
    renew_after: float  # tokens more


class ByRemaining(Policy):
    def __init__(self, settings: Srtf.Settings, predictor: Predictor, loss_weight: float):
        self._predictor = predictor
        self._prompt_weight = settings.prompt_weight
        self._loss_weight = loss_weight
        self._aging = settings.aging
        self._margin = settings.margin
        self._estimates: dict[str, Estimate] = {}  # of live requests
        self._in_vain: Request | None = None  # has found nobody to displace
        self._num_steps = 0  # planned since
        self._num_to_ask = LEAST_ASKED  # times in this step that the predictor may be asked about running requests

    def rank(self, request: Request) -> float:
        return self.work(request) + self._aging * request.arrival_time

    def work(self, request: Request) -> float:
        """In tokens of output."""
        num_to_compute = request.num_tokens - 1 - request.num_computed_tokens  # but the one that a decode is given
        if num_to_compute <= 0:
            return self._left(request)
        is_kept = request.status is RequestStatus.SWAPPED
        return self._left(request) + num_to_compute * (self._loss_weight if is_kept else self._prompt_weight)

    def victims(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        own = (self.rank(request), running.index(request))
        ranked = self._ranked(running, [self.work(one) for one in running])
        return _last_first([one for one in ranked if one[:2] > own])

    def displaced_by(self, head: Request, running: Sequence[Request]) -> Sequence[Request]:
        if head is self._in_vain and self._num_steps < LOOK_AGAIN:
            return ()
        works = [self.work(request) for request in running]
        gain = min(works) - self.work(head) - self._margin
        price = self._loss_weight * (len(self._estimates) - len(running))  # of a token computed again: all wait for it
        found = []
        if gain > 0:
            after = self.rank(head) + self._margin
            ranked = self._ranked(running, works)
            found = [one for one in ranked if one[0] > after and price * one[2].num_computed_tokens < gain]
        if not found:
            self._in_vain, self._num_steps = head, 0
        return _last_first(found)

    def joined(self, request: Request) -> None:
        if request.request_id not in self._estimates:  # new: a preempted one keeps what was said of it
            self._estimates[request.request_id] = self._asked(request)

    def started(self, request: Request) -> None:
        self._in_vain = None

    def planned(self, output: SchedulerOutput) -> None:
        self._num_steps += 1
        self._num_to_ask = max(LEAST_ASKED, len(output.scheduled) // 16)

    def left(self, request: Request) -> None:
        del self._estimates[request.request_id]
        if request.finish_reason in BY_ITSELF:
            self._predictor.observe(request)

    def _ranked(self, running: Sequence[Request], works: Sequence[float]) -> list[tuple[float, int, Request]]:
        """With where they stand: (rank, place among equals, request)."""
        aging = self._aging
        return [
            (work + aging * request.arrival_time, index, request)
            for index, (request, work) in enumerate(zip(running, works, strict=True))
        ]

    def _left(self, request: Request) -> float:
        estimate = self._estimates[request.request_id]
        num_since = len(request.output_token_ids) - estimate.num_output_tokens
        if num_since >= estimate.renew_after and self._num_to_ask:
            self._num_to_ask -= 1
            self._estimates[request.request_id] = estimate = self._asked(request)
            num_since = 0
        return max(estimate.left - num_since, 1.0)

    def _asked(self, request: Request) -> Estimate:
        """Asked again when half of what was expected has come, or half as much again as there was."""
        left, num_output = self._predictor.remaining(request), request.num_output_tokens
        return Estimate(left, num_output, min(max(left / 2, MIN_TOKENS), max(num_output / 2, FIRST_TOKENS)))


def _last_first(ranked: list[tuple[float, int, Request]]) -> list[Request]:
    return [request for _, _, request in sorted(ranked, key=lambda one: one[:2], reverse=True)]
