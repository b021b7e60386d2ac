"""Stage 5, prefill: how much of a prompt runs in a step (R5.1, R5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

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

    def __init__(self, settings: Settings, context: PrefillContext):
        self._settings = settings
        self._pace = None if settings.target_tpot is None else Pace(settings.target_tpot, settings.min_chunk)
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
            self._pace.given(request, chunk, remaining)
        return chunk

    def step_finished(self, step: StepTime) -> None:
        if self._long:
            self._long = [request for request in self._long if _is_computed(request)]
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
        self._long = [other for other in self._long if other is not request and _is_computed(other)]
        is_running = request.status is RequestStatus.RUNNING
        if not is_running and len(self._long) >= (self._settings.max_long_prefills or 0):
            return False
        self._long.append(request)
        return True


def _is_computed(request: Request) -> bool:
    """It runs, and more of it is to come than a decode's one token."""
    return request.status is RequestStatus.RUNNING and request.num_computed_tokens + 1 < request.num_tokens


class Pace:
    """How much of prompts a step can hold so that no running stream waits for longer than a target."""

    def __init__(self, target_s: float, min_chunk: int):
        self._target_s = target_s
        self._min_chunk = min_chunk
        self._cost = StepCost()
        self._num_decodes = 0  # that the step in planning will have
        self._begin()

    def _begin(self) -> None:
        self._given: set[str] = set()  # requests with tokens in the step in planning
        self._num_tokens = self._num_attended = self._num_ended = 0

    @property
    def binds(self) -> bool:
        """Whether streams run, and it is known what a step takes."""
        return self._num_decodes > 0 and self._cost.is_known

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        if request.request_id in self._given:  # nobody told that the step before has ended
            self._begin()
        most, fits = min(remaining, token_budget), self._room(request.num_computed_tokens)
        least = min(most, self._min_chunk)
        chunk = most if fits is None else min(most, fits)
        if chunk < least:  # pieces that are too small are not worth a place; but one prompt always moves on
            chunk = 0 if self._num_tokens else least
        self.given(request, chunk, remaining)
        return chunk

    def given(self, request: Request, num_tokens: int, remaining: int) -> None:
        if num_tokens and self._cost.is_known:
            self._given.add(request.request_id)
            self._num_tokens += num_tokens
            self._num_attended += attended(request.num_computed_tokens, num_tokens)
            self._num_ended += num_tokens == remaining

    def step_finished(self, step: StepTime) -> None:
        self._cost.observe(step)
        self._num_decodes = step.num_decodes + self._num_ended  # prompts that are through are streams from now on
        self._begin()

    def _room(self, start: int) -> int | None:
        planned_s = self._cost.seconds(self._num_tokens, self._num_decodes, self._num_attended)
        return self._cost.num_tokens_in(self._target_s - planned_s, start)


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
