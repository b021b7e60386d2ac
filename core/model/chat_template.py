"""Chat templates: messages -> prompt text. `ChatTemplate.render` is the only place of the project that renders one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError
from pydantic import BaseModel, ConfigDict, Field

from core.errors import ModelFileError, RequestError
from core.model.content_form import content_form
from core.model.template_budget import Budget, TemplateLimitError
from core.model.template_sandbox import TemplateEnvironment

_MAX_ERROR_CHARS = 500

# Names a template gets from us: a request can never set them, whatever the allow-list of kwargs says.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bos_token",
        "chat_template",
        "cls_token",
        "continue_final_message",
        "conversation",
        "dict",
        "documents",
        "eos_token",
        "functions",
        "mask_token",
        "messages",
        "namespace",
        "pad_token",
        "padding",
        "raise_exception",
        "range",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sep_token",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "unk_token",
    }
)


class TemplateLimits(BaseModel):
    """Bounds on one render. Templates come with model files and read what clients write, so neither is trusted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_seconds: float = Field(default=0.1, gt=0, description="CPU time of one render, in seconds")
    max_output_chars: int = Field(default=1 << 20, ge=1, description="characters of the rendered prompt")
    max_template_chars: int = Field(default=1 << 18, ge=1, description="characters of the template itself")


class _RaisedByTemplateError(TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object = "") -> NoReturn:
    raise _RaisedByTemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled template. Thread-safe; a render is bounded in CPU time and in output by `limits`."""

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], limits: TemplateLimits, source: str = "chat template"
    ) -> None:
        """`special_tokens`: the template's variables `bos_token`, `eos_token` …

        Raises ModelFileError naming `source` for a template that is too long or does not compile.
        """
        if len(template) > limits.max_template_chars:
            raise ModelFileError(f"{source}: {len(template)} characters; at most {limits.max_template_chars} are read")
        self._limits = limits
        self._variables = dict(special_tokens)
        # Macros and `set` blocks pass text on, so the same characters may count a few times before they come out.
        self._budget = Budget(limits.cpu_seconds, 4 * limits.max_output_chars)
        functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment = TemplateEnvironment(self._budget, functions)
        try:
            self._template = environment.from_string(template)
            names = {value for _, kind, value in environment.lex(template) if kind == "name"}
            self.content_form = content_form(environment.parse(template))
        except TemplateError as error:
            raise ModelFileError(f"{source}: line {getattr(error, 'lineno', '?')}: {error}") from error
        except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
            raise ModelFileError(f"{source}: does not compile: {type(error).__name__}") from error
        self.uses_tools = "tools" in names
        self.uses_reasoning_effort = "reasoning_effort" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises RequestError (param `messages`) for whatever the template raises and for a render past its limits."""
        variables = {**self._variables, **(kwargs or {})}
        variables |= {"messages": list(messages), "tools": list(tools) if tools else None, "documents": None}
        variables["add_generation_prompt"] = add_generation_prompt
        self._budget.start()
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template can raise anything a Python expression can
            raise _as_request_error(error) from error
        finally:
            self._budget.start()  # lets go of the values it kept
        if len(text) > self._limits.max_output_chars:
            raise _limit_error(f"the chat template makes more than {self._limits.max_output_chars} characters")
        return text

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render with the final message left open, so that the model continues it, whitespace at its end included.

        A random mark is put at the end of that message and the text is cut there. Raises RequestError as `render`, and
        where the template does not write the final message.
        """
        mark = f"nonet{secrets.token_hex(8)}"
        marked = [*messages[:-1], _with_mark(messages[-1], mark)]
        text = self.render(marked, add_generation_prompt=False, tools=tools, kwargs=kwargs)
        before, found, _ = text.rpartition(mark)
        if not found:
            raise RequestError(
                "continue_final_message: the chat template does not write the content of the final message",
                param="continue_final_message",
                code="template_error",
            )
        return before


def _with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` after its text, whether content is a string, null, or a list that ends in a text part."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": (content or "") + mark}
    last = content[-1] if content else {}
    if not isinstance(last, Mapping) or not isinstance(last.get("text"), str):
        raise RequestError(
            "continue_final_message: the final message must end in text", param="messages", code="invalid_value"
        )
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + mark}]}


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, TemplateLimitError):
        return _limit_error(str(error))
    detail = _bounded(str(error))
    if isinstance(error, _RaisedByTemplateError):
        message = f"the chat template refuses these messages: {detail}"
    elif isinstance(error, SecurityError):
        message = f"the chat template does something that is not allowed: {detail}"
    elif isinstance(error, RecursionError | MemoryError):
        return _limit_error("the chat template nests or grows without end")
    else:
        message = f"the chat template fails on these messages: {detail}"
    return RequestError(message, param="messages", code="template_error")


def _limit_error(message: str) -> RequestError:
    return RequestError(message, param="messages", code="template_limit")


def _bounded(text: str) -> str:
    """Short and encodable: the text may quote a client's words."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "…"
