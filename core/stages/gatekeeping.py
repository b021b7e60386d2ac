"""Stage 3's built-in admissions: the checks every request meets, and the bounded queue in front of the engine (R1.2)."""

from __future__ import annotations

import secrets

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from core.errors import OverloadedError, RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.admission import AdmissionContext
from core.stages.frontend import GenerateRequest, Load


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

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        limit = max_tokens_of(request, len(prompt_token_ids), self._context, self._default_max_tokens)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        params = msgspec.structs.replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
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
                arrival_time=self._context.clock(),
            )
            for choice in range(params.n)
        )


class LoadAware:
    """`Open` behind a bounded queue: past a bound the answer is 503 at once, with the seconds after which to try again."""

    class Settings(Open.Settings):
        max_in_flight: int = Field(default=256, ge=1, description="sequences (choices) admitted and not ended")
        max_prompt_tokens_in_flight: int = Field(default=1_000_000, ge=1)
        retry_after: float = Field(default=1.0, gt=0, description="seconds, told to refused clients")

    def __init__(self, settings: Settings, context: AdmissionContext):
        self._settings = settings
        self._open = Open(settings, context)

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        admitted = self._open.admit(request, prompt_token_ids, params, load)  # a wrong request is 400 whatever the load
        tokens = load.prompt_tokens_in_flight + len(prompt_token_ids) * len(admitted)
        self._check("max_in_flight", load.in_flight + len(admitted), self._settings.max_in_flight)
        self._check("max_prompt_tokens_in_flight", tokens, self._settings.max_prompt_tokens_in_flight)
        return admitted

    def _check(self, key: str, wanted: int, bound: int) -> None:
        if wanted > bound:
            message = f"the server is at its limit ({wanted} > admission.{key}={bound}); try again later"
            raise OverloadedError(message, retry_after=self._settings.retry_after)


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


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")
