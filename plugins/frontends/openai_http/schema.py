"""Request bodies: every number, string and list has a bound here (security rule 4), and the OpenAPI document shows it.

Types are strict: `"2"` is no number and `true` is no integer. Fixed bounds stand beside the fields; those that an
operator may move (`settings.Bounds`) are filled in by `bounded`. JSON null means "not given" for every field.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    create_model,
)

from core.stages.frontend import MAX_TTL_S
from plugins.frontends.openai_http.response_format import ResponseFormat
from plugins.frontends.openai_http.settings import Bounds
from plugins.frontends.openai_http.tool_choice import TOOL_CHOICE
from plugins.frontends.sampling_fields import Repetition
from plugins.frontends.structured_outputs import Backend, GrammarText, JsonSchema, Options, StructuredOutputs

MAX_INT32 = (1 << 31) - 1
MAX_TEXT = 1 << 24  # characters; the body limit is smaller
MAX_CALLS = 128  # of one message of the history
Model = TypeVar("Model", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$", max_length=10)]
Label = Annotated[str, Field(max_length=512)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_INT32)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WithoutEffect(Body):
    """Accepted and without effect on the answer: labels for bookkeeping, or values that ask for what happens anyway."""

    user: Label | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None  # the prefix cache finds shared prefixes by itself
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None  # vLLM's field; X-Request-Id is the one echoed


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _max_bytes(limit: int) -> AfterValidator:
    def check(words: list[str]) -> list[str]:
        if any(len(word.encode()) > limit for word in words):
            raise ValueError(f"each string may have {limit} bytes at most")
        return words

    return AfterValidator(check)


def _visible(words: list[str]) -> list[str]:
    if any(not word.strip() or any(unicodedata.category(c) == "Cc" for c in word) for word in words):
        raise ValueError("a bad word must hold a visible character and no control character")
    return words


class Structured(WithoutEffect):
    """What the answer must be: one of these fields at most (`response_format.grammar_of`). OpenAI's, vLLM's, vLLM's older."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: GrammarText | None = None
    guided_choice: Options | None = None
    guided_grammar: GrammarText | None = None
    guided_decoding_backend: Backend | None = None


class Sampling(Structured):
    """What chat and completions share. OpenAI's names, then vLLM's for the extensions."""

    model: Annotated[str, Field(max_length=256)] | None = None  # missing or "": the first served model
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None  # smaller ones make logits infinite
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL_S)] | None = None  # seconds that it may wait for its first step
    repetition_detection: Repetition | None = None
    stream_interval: Annotated[int, Field(ge=1, le=4096)] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None  # by name; `check_fields` of the pipeline knows the rest


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text  # JSON, which the renderer reads


class ToolCall(Body):
    """A call in the history: what the model wrote, as this server told it."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """One message with its content as parts; `messages.check_messages` turns a plain text into one part and back.

    `developer` is OpenAI's newer word for `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[TextPart] | None
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    reasoning_content: Text | None = None  # of the assistant; for chat templates that show it
    reasoning: Text | None = None  # the same by its other name
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class FunctionTool(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
    description: Text | None = None
    parameters: Annotated[dict[Annotated[str, Field(max_length=256)], Any], Field(max_length=256)] | None = None
    strict: bool | None = None  # true: a grammar holds calls to the parameters


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class Templated(Body):
    """What the chat template is told."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Annotated[str, Field(max_length=64)], Any], Field(max_length=32)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = (
        None  # a template's variable
    )
    tools: list[Tool] | None = None


class ChatBody(Sampling, Templated):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None  # sequences of which the `n` most probable are told
    add_special_tokens: bool | None = None


class TokenizeBody(Templated):
    """POST /tokenize: `prompt` or `messages`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_INT32)]


def _message_schema(bounds: Bounds) -> WithJsonSchema:
    """For the OpenAPI document; `messages.check_messages` checks the same."""
    text = {"type": "string", "maxLength": MAX_TEXT}
    part = {"type": "object", "properties": {"type": {"const": "text"}, "text": text}, "required": ["type", "text"]}
    parts = {"type": "array", "items": part, "minItems": 1, "maxItems": bounds.content_parts}
    calls = TypeAdapter(list[ToolCall]).json_schema(ref_template="{model}")
    call = _inlined(calls["items"], calls["$defs"])
    properties = {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [text, parts, {"type": "null"}]},
        "name": {**text, "minLength": 1, "maxLength": 64},
        "tool_calls": {"type": "array", "items": call, "maxItems": MAX_CALLS},
        "tool_call_id": {**text, "minLength": 1, "maxLength": 128},
        "reasoning_content": text,
        "reasoning": text,
    }
    return WithJsonSchema({"type": "object", "properties": properties, "required": ["role"]})


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without references: the message's schema stands inside another one."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _prompt_schema(bounds: Bounds) -> WithJsonSchema:
    text = {"type": "string", "maxLength": MAX_TEXT}
    token = {"type": "integer", "minimum": 0, "maximum": MAX_INT32}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": MAX_INT32}
    many = {"type": "array", "minItems": 1, "maxItems": bounds.prompts}
    return WithJsonSchema({"anyOf": [text, {**many, "items": text}, tokens, {**many, "items": tokens}]})


def _words(count: int, num_bytes: int) -> Any:
    word: Any = Annotated[str, Field(min_length=1, max_length=num_bytes)]
    return Annotated[list[word], Field(max_length=count), _max_bytes(num_bytes)]


def _ids(count: int, least: int = 0) -> Any:
    return Annotated[list[TokenId], Field(min_length=least, max_length=count)]


def _named_values(count: int) -> Any:
    values: Any = Annotated[dict[Annotated[str, Field(max_length=64)], Any], Field(max_length=64)]
    return Annotated[dict[Annotated[str, Field(min_length=1, max_length=64)], values], Field(max_length=count)]


def _number(low: int, high: int) -> Any:
    return Annotated[int, Field(ge=low, le=high)]


def _bounded_fields(bounds: Bounds) -> dict[str, Any]:
    """Field name -> annotation, for the bounds that settings may move."""
    logprobs = _number(0, bounds.logprobs)
    message: Any = Annotated[dict[str, Any], _message_schema(bounds)]
    messages: Any = Annotated[list[message], Field(min_length=1, max_length=bounds.messages)]
    words: Any = _words(bounds.stop, bounds.stop_bytes)
    stop: Any = Annotated[words, BeforeValidator(_one_or_many)]
    return {
        "n": _number(1, bounds.n),
        "best_of": _number(1, bounds.n),
        "stop": stop,
        "logit_bias": Annotated[dict[TokenKey, Bias], Field(max_length=bounds.logit_bias)],
        "stop_token_ids": _ids(bounds.stop_token_ids),
        "allowed_token_ids": _ids(bounds.allowed_token_ids, least=1),
        "bad_words": Annotated[_words(bounds.bad_words, bounds.bad_word_bytes), AfterValidator(_visible)],
        "logits_processors": _named_values(bounds.logits_processors),
        "prompt_logprobs": logprobs,
        "top_logprobs": logprobs,
        "messages": messages,
        "tools": Annotated[list[Tool], Field(max_length=bounds.tools)],
    }


def bounded(model: type[Model], bounds: Bounds) -> type[Model]:
    """`model` with the operator's bounds in its validators and its JSON schema."""
    fields: dict[str, Any] = {}
    for name, annotation in _bounded_fields(bounds).items():
        field = model.model_fields.get(name)
        if field is not None:
            fields[name] = annotation if field.is_required() else (annotation | None, None)
    if model is CompletionBody:
        fields["logprobs"] = (_number(0, bounds.logprobs) | None, None)
        fields["prompt"] = Annotated[Any, _prompt_schema(bounds)]
    return create_model(model.__name__, __base__=model, **fields)
