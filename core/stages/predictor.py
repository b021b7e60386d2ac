"""How many tokens a request will still generate: what shortest-first scheduling rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from core.request import Request


def num_tokens_left(request: Request, max_model_len: int) -> int:
    """The most tokens that the request may still generate, by `max_tokens` and the context; 0 or more."""
    left = min(request.params.max_tokens - request.num_output_tokens, max_model_len - request.num_tokens)
    return max(left, 0)


def _nothing_known(request_id: str) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class PredictorContext:
    max_model_len: int  # tokens of the context
    output_len: Callable[[str], int | None] = _nothing_known  # of an experiment's requests, by id; a server knows none

    @property
    def is_told(self) -> bool:
        """Whether this is an experiment, which tells `output_len`."""
        return self.output_len is not _nothing_known


class Predictor(Protocol):
    """Config group `predictor`. Asked and told by schedulers, from the engine loop only. It has no clock and changes no request.

    It is made once and lives as long as the engine, also where schedulers and caches are made anew, and its memory does not grow
    with requests: one that was aborted is asked about, and never heard of again. What it answers is a guess. Where it raises, or
    answers what cannot be, what the request may have at most counts in its place; that is reported, and fails nobody. So it is in
    the engine; `simulate` has no guards, and ends where a predictor raises.

    Example::

        from core.request import Request
        from core.stages.predictor import PredictorContext, num_tokens_left
        from pydantic import BaseModel, ConfigDict, Field


        class Mean:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                prior: float = Field(default=128.0, gt=0, description="tokens of output, before any request has ended")

            def __init__(self, settings: Settings, context: PredictorContext):
                self._max_model_len = context.max_model_len
                self._sum, self._count = settings.prior, 1

            def remaining(self, request: Request) -> float:
                most = num_tokens_left(request, self._max_model_len)
                return min(max(self._sum / self._count - request.num_output_tokens, 1.0), float(most))

            def observe(self, request: Request) -> None:
                self._sum, self._count = self._sum + request.num_output_tokens, self._count + 1
    """

    def remaining(self, request: Request) -> float:
        """Tokens that the request will still generate, as a Python float: finite, 0 or more, and at most `num_tokens_left`.

        Asked of waiting and running requests, any number of times; to ask changes no answer. Microseconds.
        """
        ...

    def observe(self, request: Request) -> None:
        """A request has ended by itself (stop, length or repetition), with the output that it has."""
        ...


class MaxTokens:
    """The bound that the request came with: sure, and far from the truth where clients name none."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: PredictorContext):
        self._max_model_len = context.max_model_len

    def remaining(self, request: Request) -> float:
        return float(num_tokens_left(request, self._max_model_len))

    def observe(self, request: Request) -> None:
        """Nothing is learnt."""
