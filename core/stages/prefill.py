"""Stage 5, prefill: how much of a prompt runs in a step (R5.1, R5.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.request import Request, RequestStatus
from core.stages.step_cost import StepCost, StepTime, attended


@dataclass(frozen=True, slots=True)
class PrefillContext:
    max_num_scheduled_tokens: int  # the token budget of a whole step


class Prefill(Protocol):
    """Config group `prefill`. Asked by the scheduler once per request that still has a prompt to compute.

    One that also has the method of `StepWatcher` is told of each step.

    Example::

        from core.request import Request
        from core.stages.prefill import PrefillContext
        from pydantic import BaseModel, ConfigDict, Field


        class Shares:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                share: float = Field(default=0.5, gt=0, le=1, description="of what is left of a step, for one prompt")

            def __init__(self, settings: Settings, context: PrefillContext):
                self._share = settings.share

            def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
                return min(remaining, max(int(token_budget * self._share), 1))
    """

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        """How many of `remaining` tokens run in this step; at most `token_budget`; 0 leaves the request for a later step.

        A waiting request that gets 0 of a whole step's budget is passed over, and does not hold back those behind it. It may
        be asked for a request that is not started after all.

        A Python int. The request is not to be changed. One for which this raises, or returns anything else, ends with an error.
        """
        ...


class StepWatcher(Protocol):
    """What a `Prefill` may have beside its own method (API 1.2)."""

    def step_finished(self, step: StepTime) -> None:
        """After each step that ran something, before the next one is planned. What it raises is reported, and fails nobody."""
        ...


class ChunkBound(Protocol):
    """What a `Prefill` may have beside its own method (API 1.2)."""

    def largest_chunk(self, num_prompt_tokens: int) -> int | None:
        """Most tokens that a prompt of up to `num_prompt_tokens` gets in a step; None: what a step holds.

        KV of sliding layers is set aside for a window and so much.
        """
        ...


class Chunked:
    """Long prompts in chunks that share the step with running decodes (idea: Sarathi-Serve, OSDI'24).

    With `target_tpot` a chunk is as large as a step can hold that takes no longer, by what steps have taken so far; its other
    sizes hold until two steps with prompts were seen, and while no stream runs whose next token could be late.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        chunk_size: int = Field(default=512, ge=1, description="tokens of one prompt per step")
        long_chunk_size: int = Field(
            default=1024, ge=1, description="chunk for prompts of `long_prompt` tokens and more"
        )
        long_prompt: int = Field(default=8192, ge=1)
        target_tpot: float | None = Field(
            default=None, gt=0, description="seconds between two tokens of a running stream; null: chunks of fixed size"
        )
        min_chunk: int = Field(
            default=16, ge=1, description="tokens of prompts per step, at least, whatever target_tpot would allow"
        )
        max_long_prefills: int | None = Field(
            default=None, ge=1, description="prompts with `long_prompt` tokens to compute that are at it at once"
        )

        @model_validator(mode="after")
        def _pace_keys_go_together(self) -> Self:
            if self.target_tpot is None and "min_chunk" in self.model_fields_set:
                raise ValueError(
                    "prefill.min_chunk bounds the chunks of prefill.target_tpot, and that is not set; set prefill.target_tpot "
                    "(0.05), or leave out prefill.min_chunk"
                )
            return self

    def __init__(self, settings: Settings, context: PrefillContext):
        self._settings = settings
        self._pace = None if settings.target_tpot is None else Pace(settings.target_tpot, settings.min_chunk, context)
        self._long: list[Request] = []  # of those asked for, what is being computed

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        settings = self._settings
        if settings.max_long_prefills is not None and not self._may_run(request, remaining):
            return 0
        if self._pace is not None and self._pace.binds:
            return self._pace.num_tokens(request, remaining, token_budget)
        long = request.num_prompt_tokens >= settings.long_prompt
        chunk = min(remaining, token_budget, settings.long_chunk_size if long else settings.chunk_size)
        if self._pace is not None:
            self._pace.offer(request, chunk, remaining)
        return chunk

    def step_finished(self, step: StepTime) -> None:
        if self._long:
            self._long = [request for request in self._long if _is_in_prefill(request)]
        if self._pace is not None:
            self._pace.step_finished(step)

    def largest_chunk(self, num_prompt_tokens: int) -> int | None:
        settings = self._settings
        if self._pace is not None:
            return None
        return max(settings.chunk_size, settings.long_chunk_size if num_prompt_tokens >= settings.long_prompt else 0)

    def _may_run(self, request: Request, remaining: int) -> bool:
        """A running one always may: it holds blocks. What was asked for and not started, or gave way, counts no more."""
        is_known = any(other is request for other in self._long)
        if not is_known and remaining < self._settings.long_prompt:
            return True
        self._long = [other for other in self._long if other is not request and _is_in_prefill(other)]
        is_running = request.status is RequestStatus.RUNNING
        if not is_running and len(self._long) >= (self._settings.max_long_prefills or 0):
            return False
        self._long.append(request)
        return True


def _is_in_prefill(request: Request) -> bool:
    """It runs, and more of it is to come than a decode's one token."""
    return request.status is RequestStatus.RUNNING and request.num_computed_tokens + 1 < request.num_tokens


@dataclass(frozen=True, slots=True)
class Offer:
    """A chunk that a request may have in the step in planning. Whether it has it, its own record tells."""

    request: Request
    num_computed_tokens: int  # when it was asked for; -1: it did not run
    start: int
    num_tokens: int
    is_last: bool  # of its prompt

    @property
    def is_planned(self) -> bool:
        runs = self.request.status is RequestStatus.RUNNING
        return runs and self.request.num_computed_tokens > self.num_computed_tokens


@dataclass(slots=True)
class Planned:
    """Chunks of a step, added up."""

    num_tokens: int = 0
    num_attended: int = 0
    through: list[Request] = field(default_factory=list)  # their last chunk is among them

    def add(self, offer: Offer) -> None:
        self.num_tokens += offer.num_tokens
        self.num_attended += attended(offer.start, offer.num_tokens)
        if offer.is_last:
            self.through.append(offer.request)


NOTHING = Planned()


class Pace:
    """How much of prompts a step can hold so that no running stream waits for longer than a target.

    What the prompts of a step share is counted by facts and not by answers: a request that is asked for may lack blocks, and
    one that is left out is asked for again. A scheduler that plans a chunk moves `num_computed_tokens` on before it asks for
    the next one (as `core.scheduling` does), so an offer counts once the request runs and has moved. And where more has been
    counted than the token budget shows as planned, the question is not about the step in hand: it is what a whole step would
    do, or the step before failed and nobody told of its end; then nothing counts.
    """

    def __init__(self, target_s: float, min_chunk: int, context: PrefillContext):
        self._target_s = target_s
        self._min_chunk = min_chunk
        self._max_tokens = context.max_num_scheduled_tokens
        self._cost = StepCost()
        self._num_decodes = 0  # that the step in planning will have
        self._offers: dict[str, Offer] = {}  # of this step, not seen to be planned; the last one of a request holds
        self._planned = Planned()

    @property
    def binds(self) -> bool:
        """Whether streams run, and it is known what a step takes."""
        return self._num_decodes > 0 and self._cost.is_known

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        self._count()
        planned = self._planned if self._planned.num_tokens <= self._max_tokens - token_budget else NOTHING
        most, fits = min(remaining, token_budget), self._room(planned, _start(request, remaining))
        least = min(most, self._min_chunk)
        chunk = most if fits is None else min(most, fits)
        if chunk < least:  # pieces that are too small are not worth a place; but one prompt always moves on
            chunk = 0 if planned.num_tokens else least
        self.offer(request, chunk, remaining)
        return chunk

    def offer(self, request: Request, num_tokens: int, remaining: int) -> None:
        if not self._cost.is_known:
            return
        self._offers.pop(request.request_id, None)
        if num_tokens:
            computed = request.num_computed_tokens if request.status is RequestStatus.RUNNING else -1
            self._offers[request.request_id] = Offer(
                request, computed, _start(request, remaining), num_tokens, num_tokens == remaining
            )

    def step_finished(self, step: StepTime) -> None:
        self._count()
        self._cost.observe(step)
        new = sum(request.status is RequestStatus.RUNNING for request in self._planned.through)
        self._num_decodes = step.num_decodes + new  # prompts that are through are streams from now on
        self._offers, self._planned = {}, Planned()

    def _count(self) -> None:
        for offer in [offer for offer in self._offers.values() if offer.is_planned]:
            self._planned.add(self._offers.pop(offer.request.request_id))

    def _room(self, planned: Planned, start: int) -> int | None:
        planned_s = self._cost.seconds(planned.num_tokens, self._num_decodes, planned.num_attended)
        return self._cost.num_tokens_in(self._target_s - planned_s, start)


def _start(request: Request, remaining: int) -> int:
    """Where its chunk begins. A waiting request has its prefix hit in `remaining` alone."""
    return max(request.num_known_tokens - remaining, 0)


class Whole:
    """All prompt tokens in one forward pass (R5.1): a prompt waits until a step's budget holds it whole.

    A prompt longer than the whole step budget can never fit; it gets the full budget of a step, so that it still ends.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: PrefillContext):
        self._max_tokens = context.max_num_scheduled_tokens

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        if remaining <= token_budget:
            return remaining
        return token_budget if token_budget == self._max_tokens else 0
