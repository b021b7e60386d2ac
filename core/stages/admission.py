"""Stage 3, admission: bounds, queue caps, deadlines, tenant limits; makes the typed request (R3.1, R1.2).

The contract, then `Open`, the checks every request meets. `core.stages.load_aware` puts a bounded queue before it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from core.errors import RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.frontend import MAX_TTL_S, GenerateRequest, Load

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.stages.load_aware import LoadAware as LoadAware  # see the end of the file


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    model: ModelSpec
    clock: Callable[[], float]  # monotonic seconds
    num_kv_slots: Callable[[], int]  # tokens that the whole KV pool holds; 0 while unknown


class Admission(Protocol):
    """Config group `admission`. Called once per request, in the event loop of the front process: must not block.

    Example::

        from core.errors import RequestError
        from core.request import EngineRequest, SamplingParams
        from core.stages.admission import AdmissionContext, Open
        from core.stages.frontend import GenerateRequest, Load
        from pydantic import Field


        class ShortPrompts:
            class Settings(Open.Settings):
                max_prompt_tokens: int = Field(default=1000, ge=1)

            def __init__(self, settings: Settings, context: AdmissionContext):
                self._open, self._limit = Open(settings, context), settings.max_prompt_tokens

            def check_room(self, num_choices: int, load: Load) -> None:
                self._open.check_room(num_choices, load)

            def admit(
                self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
            ) -> tuple[EngineRequest, ...]:
                if len(prompt_token_ids) > self._limit:
                    raise RequestError(f"the prompt has more than {self._limit} tokens", param="prompt")
                return self._open.admit(request, prompt_token_ids, params, load)
    """

    def check_room(self, num_choices: int, load: Load) -> None:
        """Before anything is rendered: is there room for a call of `num_choices` sequences, whatever its prompts are?

        Under overload a refusal must not cost a tokenizer's work. Raises OverloadedError, or RequestError where the call
        alone is past the bound.
        """
        ...

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        """One EngineRequest per choice (`request_id` of choice i is f"{request.request_id}#{i}").

        A request with a `ttl` has a deadline that long after its arrival, or an earlier one. One whose admission leaves it
        without a deadline is given that one (admissions of API 1.1 know of none).

        Raises RequestError (context length, max_tokens …; names field and numbers) or OverloadedError (Retry-After).
        """
        ...


class Open:
    """Admits whatever fits the model's context and the KV pool."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        default_max_tokens: int | None = Field(
            default=None, ge=1, description="when a client names no max_tokens; null: what is left of the context"
        )

    def __init__(self, settings: Settings, context: AdmissionContext):
        self._default_max_tokens = settings.default_max_tokens
        self._context = context

    def check_room(self, num_choices: int, load: Load) -> None:
        """There always is."""

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        limit = max_tokens_of(request, len(prompt_token_ids), self._context, self._default_max_tokens)
        least = min_tokens_of(request, params, limit)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        params = msgspec.structs.replace(params, max_tokens=limit, min_tokens=least)
        arrival = self._context.clock()
        deadline = deadline_of(request, arrival)
        return tuple(
            EngineRequest(
                request_id=f"{request.request_id}#{choice}",
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=seed,
                choice=choice,
                priority=request.priority,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                arrival_time=arrival,
                deadline=deadline,
            )
            for choice in range(params.n)
        )


def max_tokens_of(request: GenerateRequest, num_prompt: int, context: AdmissionContext, default: int | None) -> int:
    """How many tokens the request may generate. Raises RequestError with the field and the three numbers.

    Without a number from the client: what is left of the context and of the KV pool, at least one.
    """
    context_len, slots = context.model.max_model_len, context.num_kv_slots()
    wanted, param = request.max_tokens, request.max_tokens_param
    if num_prompt >= context_len:
        raise _too_long(
            f"the prompt has {num_prompt} tokens and the context holds {context_len}, at least one of them generated",
            "prompt",
        )
    if slots and num_prompt >= slots:
        raise _too_long(
            f"the prompt has {num_prompt} tokens and the KV cache holds {slots}, at least one of them generated",
            "prompt",
        )
    if wanted is None:
        return min(default or context_len, min(context_len, slots or context_len) - num_prompt)
    if wanted < 1:
        raise RequestError(f"{param} must be at least 1, not {wanted}", param=param)
    for what, limit in (("context", context_len), ("KV cache", slots)):
        if limit and num_prompt + wanted > limit:
            raise _too_long(
                f"{param}={wanted} and a prompt of {num_prompt} tokens make {num_prompt + wanted}; the {what} holds {limit}",
                param,
            )
    return wanted


def min_tokens_of(request: GenerateRequest, params: SamplingParams, limit: int) -> int:
    """min_tokens, cut to `limit` where the client named no limit of its own. Raises RequestError where the two contradict."""
    if request.max_tokens is not None and params.min_tokens > limit:
        raise RequestError(
            f"min_tokens={params.min_tokens} is more than {request.max_tokens_param}={limit}", param="min_tokens"
        )
    return min(params.min_tokens, limit)


def deadline_of(request: GenerateRequest, arrival: float) -> float | None:
    """Monotonic seconds. Raises RequestError for a `ttl` that nobody could mean."""
    ttl = request.ttl
    if ttl is None:
        return None
    if not (math.isfinite(ttl) and 0 < ttl <= MAX_TTL_S):
        raise RequestError(f"ttl must be more than 0 and at most {MAX_TTL_S:g} seconds, not {ttl:g}", param="ttl")
    return arrival + ttl


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Where `LoadAware` was in API 1.1. It is looked up when it is asked for, since it is made of `Open`."""
        if name != "LoadAware":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from core.stages.load_aware import LoadAware

        return LoadAware
