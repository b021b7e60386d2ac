"""Stage 5, prefill: how much of a prompt runs in a step (R5.1, R5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from core.request import Request


@dataclass(frozen=True, slots=True)
class PrefillContext:
    max_num_scheduled_tokens: int  # the token budget of a whole step


class Prefill(Protocol):
    """Config group `prefill`. Asked by the scheduler once per request that still has a prompt to compute.

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

        A Python int. The request is not to be changed. One for which this raises, or returns anything else, ends with an error.
        """
        ...


class Chunked:
    """Long prompts in chunks that share the step with running decodes (idea: Sarathi-Serve, OSDI'24)."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        chunk_size: int = Field(default=512, ge=1, description="tokens of one prompt per step")
        long_chunk_size: int = Field(
            default=1024, ge=1, description="chunk for prompts of `long_prompt` tokens and more"
        )
        long_prompt: int = Field(default=8192, ge=1)

    def __init__(self, settings: Settings, context: PrefillContext):
        self._settings = settings

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        long = request.num_prompt_tokens >= self._settings.long_prompt
        chunk = self._settings.long_chunk_size if long else self._settings.chunk_size
        return min(remaining, token_budget, chunk)


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
