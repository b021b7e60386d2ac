"""Chat messages and prompts as clients write them -> the renderer's `Prompt` records.

Only text parts pass. Image and audio parts are refused by type, so no URL in a request is ever looked at (bugs P8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from core.errors import RequestError
from core.model.chat_template import RESERVED_KWARGS
from core.stages.renderer import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from plugins.frontends.openai_http.fields import printable
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.openai_http.schema import MAX_TEXT, Message, Templated, TokenIds
from plugins.frontends.openai_http.settings import Bounds
from plugins.frontends.openai_http.tools import tools_of

REASONING = ("reasoning_content", "reasoning")
_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)


def unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported")


def check_messages(messages: Sequence[Mapping[str, Any]], bounds: Bounds) -> list[dict[str, Any]]:
    """Messages in OpenAI's shape with text only; `developer` becomes `system`. Raises RequestError with the position."""
    return [_message(message, f"messages[{index}]", bounds) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str, bounds: Bounds) -> dict[str, Any]:
    _check_tool_fields(message, param)
    body = {key: value for key, value in message.items() if value is not None or key == "content"}
    if body.get("tool_calls") == []:
        del body["tool_calls"]
    content = body.get("content", [])
    if isinstance(content, str):
        body["content"] = [{"type": "text", "text": content}]
    elif content in (None, []) and body.get("tool_calls"):
        body["content"] = content = None
    elif isinstance(content, list):
        _check_parts(content, f"{param}.content", bounds)
    else:
        raise RequestError(
            "The content is a text or a list of text parts.", param=f"{param}.content", code="invalid_type"
        )
    checked = validate(Message, body, prefix=param).model_dump(exclude_none=True)
    role = "system" if checked["role"] == "developer" else checked["role"]
    return {**checked, **_reasoning(checked, param), "role": role, "content": content}


def _reasoning(checked: Mapping[str, Any], param: str) -> dict[str, str]:
    """Under both of its names: some chat templates know the older one alone, and some the newer."""
    found = {name: checked[name] for name in REASONING if name in checked}
    if len(set(found.values())) > 1:
        message = "`reasoning` and `reasoning_content` are two names of one text, and differ here; send one."
        raise RequestError(message, param=f"{param}.reasoning")
    return {name: text for text in found.values() for name in REASONING}


def _check_tool_fields(message: Mapping[str, Any], param: str) -> None:
    """Which message may have which; their shapes are in `schema.Message`."""
    role = message.get("role")
    if role == "function" or message.get("function_call") is not None:
        field = "role" if role == "function" else "function_call"
        raise unsupported(
            "Functions are called by OpenAI's newer `tool_calls` and `tool` messages.", f"{param}.{field}"
        )
    if role != "assistant" and message.get("tool_calls") not in (None, []):
        raise RequestError("Only a message of the assistant has tool calls.", param=f"{param}.tool_calls")
    for name in REASONING if role != "assistant" else ():
        if message.get(name) is not None:
            raise RequestError("Only a message of the assistant has reasoning.", param=f"{param}.{name}")
    if role != "tool" and message.get("tool_call_id") is not None:
        raise RequestError("Only a message of a tool answers a tool call.", param=f"{param}.tool_call_id")
    if role == "tool" and message.get("tool_call_id") is None:
        raise RequestError(
            "A tool's message names the call that it answers.", param=f"{param}.tool_call_id", code="missing_field"
        )


def _check_parts(parts: list[Any], param: str, bounds: Bounds) -> None:
    """A missing `content` passes for an empty list here."""
    if not 1 <= len(parts) <= bounds.content_parts:
        raise RequestError(f"There must be 1 to {bounds.content_parts} content parts.", param=param)
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            message = (
                f"Content parts of type `{printable(kind)}` need a multimodal renderer plugin; only text is served."
            )
            raise unsupported(message, f"{param}[{index}].type")


def chat_prompt(body: Templated, messages: Sequence[Mapping[str, Any]], bounds: Bounds) -> ChatPrompt:
    """Raises RequestError for a message, a reserved template argument, or flags that contradict each other."""
    checked = check_messages(messages, bounds)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other."
        raise RequestError(message, param="continue_final_message")
    if continued and checked[-1]["role"] != "assistant":
        message = "`continue_final_message` needs an assistant message at the end."
        raise RequestError(message, param="continue_final_message")
    prompt = (not continued) if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = _with_effort(template_kwargs(body.chat_template_kwargs or {}), body.reasoning_effort)
    return ChatPrompt(checked, prompt, continued, kwargs, tools=tools_of(body) or None)


def template_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in kwargs:
        if name in RESERVED_KWARGS or name.startswith("_"):
            message = f"`{printable(name)}` is reserved and cannot be set by a request."
            raise RequestError(message, param=f"chat_template_kwargs.{printable(name)}")
    return kwargs


def _with_effort(kwargs: Mapping[str, Any], effort: str | None) -> Mapping[str, Any]:
    """`reasoning_effort` is a variable of the chat template, as in vLLM."""
    if effort is None:
        return kwargs
    if kwargs.get("reasoning_effort", effort) != effort:
        message = "`reasoning_effort` and `chat_template_kwargs.reasoning_effort` contradict each other; send one."
        raise RequestError(message, param="reasoning_effort")
    return {**kwargs, "reasoning_effort": effort}


def prompts(value: Any, bounds: Bounds, add_special_tokens: bool = True) -> list[Prompt]:
    """A text, a list of texts, a list of token ids, or a list of those -> one prompt each. Raises RequestError."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > bounds.prompts:
            raise RequestError(f"A call may hold {bounds.prompts} prompts at most, not {len(value)}.", param="prompt")
        if any(type(item) is not type(value[0]) for item in value):
            raise RequestError(
                "A list holds texts or lists of token ids, not both.", param="prompt", code="invalid_type"
            )
        return [_prompt(item, f"prompt[{i}]", add_special_tokens) for i, item in enumerate(value)]
    return [_prompt(value, "prompt", add_special_tokens)]


def _prompt(value: Any, param: str, add_special_tokens: bool) -> Prompt:
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise RequestError(f"The text is longer than {MAX_TEXT} characters.", param=param)
        return TextPrompt(value, add_special_tokens)
    if not isinstance(value, list):
        raise RequestError("A prompt is a text or a list of token ids.", param=param, code="invalid_type")
    token_ids: list[int] = validate(_TOKEN_IDS, value, prefix=param)
    return TokenPrompt(token_ids)
