"""Checked request bodies -> the pipeline's `SamplingParams` and `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from core.errors import RequestError, near_matches
from core.request import RepetitionDetection, SamplingParams
from core.stages.frontend import GenerateRequest
from core.stages.renderer import Prompt
from plugins.frontends.openai_http.fields import printable
from plugins.frontends.openai_http.response_format import backend_param_of
from plugins.frontends.openai_http.schema import ChatBody, CompletionBody, Sampling
from plugins.frontends.structured_outputs import Asked

_PLAIN = (
    *("n", "temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "stream_interval"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
_TUPLES = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls and under which id; comes from headers, never from the body."""

    request_id: str
    tenant: str = ""
    received_time: float | None = None  # monotonic seconds
    trace_context: str = ""


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """What a model's generation_config says of sampling, in our names."""
    found = {name: generation_config.get(name) for name in MODEL_DEFAULTS}
    numbers: dict[str, float] = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    if generation_config.get("do_sample") is False:
        numbers["temperature"] = 0.0
    return numbers


def sampling_params(
    body: Sampling, defaults: Mapping[str, float], logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """`max_tokens` stays open here: admission sets it from the GenerateRequest. Raises RequestError."""
    values: dict[str, Any] = dict(defaults)
    values |= {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    values |= {name: tuple(getattr(body, name)) for name in _TUPLES if getattr(body, name) is not None}
    top_k = body.top_k if body.top_k is not None else values.get("top_k", 0)
    values["top_k"] = max(int(top_k), 0)
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    values["extra"] = body.logits_processors or {}
    if body.repetition_detection is not None:
        values["repetition_detection"] = RepetitionDetection(**body.repetition_detection.model_dump())
    return SamplingParams(**values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _logit_bias(entries: Mapping[str, float]) -> dict[int, float]:
    bias = {int(token): value for token, value in entries.items()}
    if len(bias) != len(entries):
        raise RequestError("`logit_bias` names a token twice.", param="logit_bias")
    return bias


def check_common(body: Sampling, max_tokens: int | None) -> None:
    """Rules that hold between fields. Raises RequestError."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream: true`.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("`prompt_logprobs` needs `stream: false`.", param="prompt_logprobs")
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        message = f"`min_tokens` ({body.min_tokens}) is larger than the limit of {max_tokens} tokens."
        raise RequestError(message, param="min_tokens")


def check_model(name: str | None, served: tuple[str, ...]) -> str:
    """The model's served name; a missing or empty one means the first. Raises RequestError 404."""
    if not name:
        return served[0]
    if name not in served:
        message = f"The model `{printable(name)}` does not exist{near_matches(printable(name), served)}"
        raise RequestError(message, param="model", code="model_not_found", status=404)
    return name


def chat_request(
    body: ChatBody, prompt: Prompt, caller: Caller, defaults: Mapping[str, float], asked: Asked | None = None
) -> GenerateRequest:
    """Raises RequestError."""
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    check_common(body, max_tokens)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        message = "`max_completion_tokens` and `max_tokens` contradict each other; send one."
        raise RequestError(message, param="max_completion_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _request(
        body,
        prompt,
        sampling_params(body, defaults, logprobs, body.prompt_logprobs),
        caller,
        asked,
        max_tokens=max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
    )


def completion_requests(
    body: CompletionBody,
    prompts: list[Prompt],
    caller: Caller,
    defaults: Mapping[str, float],
    asked: Asked | None = None,
) -> list[GenerateRequest]:
    """One request per prompt; ids are made unique by the prompt's index. Raises RequestError."""
    check_common(body, body.max_tokens)
    echoed = body.logprobs if body.echo else None
    params = sampling_params(body, defaults, body.logprobs, echoed if echoed is not None else body.prompt_logprobs)
    params = _with_best_of(params, body)
    ids = [caller.request_id] if len(prompts) == 1 else [f"{caller.request_id}-{i}" for i in range(len(prompts))]
    return [
        _request(body, prompt, params, replace(caller, request_id=request_id), asked, max_tokens=body.max_tokens)
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]


def _with_best_of(params: SamplingParams, body: CompletionBody) -> SamplingParams:
    """As many choices as are drawn, each with the log-probabilities by which the answer's are taken."""
    best = body.best_of
    if best is None or best == params.n:
        return params
    if best < params.n:
        raise RequestError(f"`best_of` ({best}) is less than `n` ({params.n}).", param="best_of")
    if body.stream:
        message = "`best_of` needs `stream: false`: which are the best is known at the end."
        raise RequestError(message, param="best_of", code="unsupported")
    return msgspec.structs.replace(params, n=best, logprobs=params.logprobs or 0)


def _request(
    body: Sampling,
    prompt: Prompt,
    params: SamplingParams,
    caller: Caller,
    asked: Asked | None,
    *,
    max_tokens: int | None,
    max_tokens_param: str = "max_tokens",
) -> GenerateRequest:
    if asked is not None:
        params = msgspec.structs.replace(params, grammar=asked.spec)
    return GenerateRequest(
        request_id=caller.request_id,
        prompt=prompt,
        params=params,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        grammar_param=asked.param if asked is not None else "",
        grammar_backend_param=backend_param_of(body),
        stream=bool(body.stream),
        tenant=caller.tenant,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        received_time=caller.received_time,
        ttl=body.ttl,
        trace_context=caller.trace_context,
    )
