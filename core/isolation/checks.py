"""What the stages of the front hand over, checked: stages 1 to 3. (`core.front.texts` checks stage 8.)

Each function raises `core.isolation.front.MalformedError`, which says what is wrong, and returns copies that nobody else holds: a
plugin that keeps or changes what it was given can harm the call in question alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from core.isolation.front import MalformedError, is_encodable, kind_of
from core.request import EngineRequest, SamplingParams
from core.stages.admission import Admission
from core.stages.frontend import GenerateRequest, Load
from core.stages.renderer import ChatPrompt, Prompt, RenderedPrompt, Renderer, TextPrompt, TokenPrompt

S = TypeVar("S", bound=msgspec.Struct)

MAX_CHOICES = 4096
MAX_PROMPT_DEPTH = 256
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_NOT_NEGATIVE = ("temperature", "top_p", "min_p", "top_k", "min_tokens", "stream_interval")
REQUEST_TYPES: Mapping[str, tuple[type, ...]] = {
    "request_id": (str,),
    "max_tokens": (int, type(None)),
    "max_tokens_param": (str,),
    "grammar_param": (str,),
    "grammar_backend_param": (str,),
    "stream": (bool,),
    "tenant": (str,),
    "priority": (int,),
    "cache_salt": (str,),
    "received_time": (int, float, type(None)),
    "trace_context": (str,),
    "ttl": (int, float, type(None)),
}
"""Of every field of GenerateRequest but `prompt` and `params`."""


def checked_request(request: object) -> GenerateRequest:
    """What a frontend made of a client's words. Values that a client may get wrong are judged by the stages, not here."""
    if not isinstance(request, GenerateRequest):
        raise MalformedError(f"it made {kind_of(request)} of a request, not a GenerateRequest")
    for name, types in REQUEST_TYPES.items():
        value = getattr(request, name)
        if type(value) not in types:
            raise MalformedError(f"its request's {name} is {kind_of(value)}")
        if isinstance(value, str) and not is_encodable(value):
            raise MalformedError(f"its request's {name} has a lone surrogate")
        _check_number(value, f"its request's {name}")
    return replace(
        request, prompt=private_prompt(request.prompt), params=checked_params(request.params, "its request's")
    )


def private_prompt(prompt: object) -> Prompt:
    """A copy down to the strings. Objects that are no JSON stay what they are."""
    match prompt:
        case TextPrompt(text=str(), add_special_tokens=bool()):
            return replace(prompt)
        case TokenPrompt(token_ids=Sequence()) if not isinstance(prompt.token_ids, str | bytes):
            return TokenPrompt(list(prompt.token_ids))
        case ChatPrompt():
            for message in prompt.messages:
                if not isinstance(message, Mapping):
                    raise MalformedError(f"its request's prompt holds {kind_of(message)} as a message")
            return replace(
                prompt,
                messages=_private(prompt.messages),
                template_kwargs=_private(prompt.template_kwargs),
                tools=_private(prompt.tools),
            )
    raise MalformedError(f"its request's prompt is {kind_of(prompt)}, or holds what no prompt may")


def _private(value: Any, depth: int = 0) -> Any:
    if depth > MAX_PROMPT_DEPTH:
        raise MalformedError(f"its request's prompt is nested deeper than {MAX_PROMPT_DEPTH} levels")
    if isinstance(value, Mapping):
        return {key: _private(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_private(item, depth + 1) for item in value]
    return value


def checked_params(params: object, whose: str) -> SamplingParams:
    """A copy, with every field of its declared type and every number finite."""
    if type(params) is not SamplingParams:
        raise MalformedError(f"{whose} params are {kind_of(params)}, not SamplingParams")
    try:
        copy = copied(params)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedError(f"{whose} params are malformed: {error}") from None
    for name in _FLOATS:
        _check_number(getattr(copy, name), f"{whose} {name}")
    for name in _NOT_NEGATIVE:
        if getattr(copy, name) < 0:
            raise MalformedError(f"{whose} {name} is negative")
    for value in copy.logit_bias.values():
        _check_number(value, f"{whose} logit_bias")
    _check_number(copy.seed, f"{whose} seed")
    if not 1 <= copy.n <= MAX_CHOICES:
        raise MalformedError(f"{whose} n is {copy.n}")
    return copy


def checked_render(renderer: Renderer, prompt: Prompt, vocab_size: int) -> RenderedPrompt:
    """Stage 2 for one prompt, on a copy of it. Raises what the renderer raises, too."""
    shown = private_prompt(prompt)
    rendered = renderer.render(shown)
    if type(rendered) is not RenderedPrompt:
        raise MalformedError(f"render returned {kind_of(rendered)}, not a RenderedPrompt")
    if shown != prompt:
        raise MalformedError("it changed the prompt that it was given")
    ids = rendered.token_ids
    if type(ids) is not list or not set(map(type, ids)) <= {int}:
        raise MalformedError("render returned token ids that are no list of integers")
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise MalformedError(f"render returned token ids that are none, or not all in [0, {vocab_size})")
    if rendered.text is not None and type(rendered.text) is not str:
        raise MalformedError(f"render returned {kind_of(rendered.text)} as the text")
    return RenderedPrompt(list(ids), rendered.text)


def checked_prepare(renderer: Renderer, params: SamplingParams) -> SamplingParams:
    """Stage 2's other half."""
    shown = copied(params)
    prepared = checked_params(renderer.prepare(shown), "prepare returned params whose")
    if shown != params:
        raise MalformedError("it changed the params that it was given")
    if prepared.n != params.n:
        raise MalformedError(f"prepare made n={prepared.n} of n={params.n}")
    return prepared


def checked_admit(
    admission: Admission,
    request: GenerateRequest,
    token_ids: list[int],
    params: SamplingParams,
    load: Load,
    limit: int,
    now: float,
) -> tuple[EngineRequest, ...]:
    """Stage 3: one sequence per choice, each within `limit` tokens. Raises what the admission raises, too.

    `now`: monotonic seconds, from which a `ttl` counts that the admission does nothing about (API 1.1).
    """
    shown = list(token_ids)
    shown_params = copied(params)
    sequences = admission.admit(request, shown, shown_params, load)
    if shown != token_ids or shown_params != params:
        raise MalformedError("it changed the prompt or the params that it was given")
    if not isinstance(sequences, tuple | list) or len(sequences) != params.n:
        raise MalformedError(f"admit returned {kind_of(sequences)}, not one sequence for each of {params.n} choices")
    checked = tuple(
        _checked_sequence(sequence, request.request_id, choice, token_ids, limit)
        for choice, sequence in enumerate(sequences)
    )
    if request.ttl is None:
        return checked
    return tuple(_with_deadline(sequence, now + request.ttl) for sequence in checked)


def _with_deadline(sequence: EngineRequest, deadline: float) -> EngineRequest:
    return sequence if sequence.deadline is not None else msgspec.structs.replace(sequence, deadline=deadline)


def _checked_sequence(sequence: object, key: str, choice: int, token_ids: list[int], limit: int) -> EngineRequest:
    if type(sequence) is not EngineRequest:
        raise MalformedError(f"admit returned {kind_of(sequence)} as a sequence, not an EngineRequest")
    if (sequence.request_id, sequence.choice) != (f"{key}#{choice}", choice):
        raise MalformedError(f"admit returned {sequence.request_id!r} as the sequence of choice {choice}")
    if type(sequence.prompt_token_ids) is not list or sequence.prompt_token_ids != token_ids:
        raise MalformedError("admit returned another prompt than the one it was given")
    params = checked_params(sequence.params, "admit returned a sequence whose")
    bare = msgspec.structs.replace(sequence, prompt_token_ids=[], params=params)
    try:
        copy = copied(bare)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise MalformedError(f"admit returned a malformed sequence: {error}") from None
    for name in ("arrival_time", "deadline", "priority", "seed"):
        _check_number(getattr(copy, name), f"admit returned a sequence whose {name}")
    if not (params.max_tokens >= 1 and len(token_ids) + params.max_tokens <= limit):
        raise MalformedError(
            f"admit returned max_tokens={params.max_tokens} for a prompt of {len(token_ids)}; the context holds {limit}"
        )
    return msgspec.structs.replace(copy, prompt_token_ids=token_ids)


def copied(struct: S) -> S:
    """Down to its strings, and checked by its types; bytes, which nobody can change, stay the same object."""
    as_is = (bytes,)
    plain = msgspec.to_builtins(struct, builtin_types=as_is)
    return msgspec.convert(plain, type(struct), builtin_types=as_is)


def _check_number(value: object, what: str) -> None:
    """Raises for NaN, infinities and integers that cannot cross to the engine."""
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedError(f"{what} is {value}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise MalformedError(f"{what} is an integer of more than 64 bits")
