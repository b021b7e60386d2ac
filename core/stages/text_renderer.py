"""`text` and `token_ids`: the built-in renderers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from core.errors import ConfigError, RequestError, near_matches
from core.model.chat_template import RESERVED_KWARGS, ChatTemplate, TemplateLimits
from core.request import SamplingParams
from core.stages.renderer import ChatPrompt, Prompt, RenderedPrompt, RendererContext, TextPrompt, TokenPrompt
from core.stages.tool_history import template_messages
from core.stages.vocabulary_params import check_text, check_token_ids, prepare_params

if TYPE_CHECKING:
    from core.model.tokenizer import Tokenizer

EFFORT = "reasoning_effort"
NO_TOOLS = (
    "the chat template of {model} does not show tools to the model; give one that does with renderer.chat_template=<file>, "
    "such as examples/templates/chatml_tools.jinja for a model that knows ChatML (docs/http.md, Tools)"
)


class Text:
    """Chat template and tokenizer.

    BOS stands exactly once at the start where the tokenizer adds one: not again where the template or the client wrote it.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        chat_template: Path | None = Field(
            default=None, description="a Jinja file in place of the model's own chat template"
        )
        template_kwargs: tuple[str, ...] = Field(
            default=("enable_thinking", "thinking", "reasoning_effort"),
            description="names that a request may set in chat_template_kwargs",
        )
        limits: TemplateLimits = TemplateLimits()

        @field_validator("template_kwargs")
        @classmethod
        def _not_reserved(cls, names: tuple[str, ...]) -> tuple[str, ...]:
            for name in names:
                if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
                    raise ValueError(f"{name!r} is set by the renderer itself; a request cannot be allowed to")
            return names

    def __init__(self, settings: Settings, context: RendererContext) -> None:
        """Raises ConfigError for a template file that cannot be read, ModelFileError for one that does not compile."""
        self._settings = settings
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._template = self._load_template()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def shows_tools(self) -> bool:
        """Its template has tools in it."""
        return self._template is not None and self._template.uses_tools

    def render(self, prompt: Prompt) -> RenderedPrompt:
        if isinstance(prompt, TokenPrompt):
            return _render_token_ids(prompt, self._model.vocab_size)
        if isinstance(prompt, TextPrompt):
            return self._render_text(prompt)
        return self._render_chat(prompt)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return prepare_params(params, self._model, self._tokenizer)

    def _load_template(self) -> ChatTemplate | None:
        path, text, source = (
            self._settings.chat_template,
            self._tokenizer.chat_template,
            f"{self._model.name}: chat template",
        )
        if path is not None:
            source = str(path)
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"renderer.chat_template: {path} cannot be read: {error}") from error
        if text is None:
            return None
        return ChatTemplate(text, self._tokenizer.special.names, self._settings.limits, source)

    def _render_text(self, prompt: TextPrompt) -> RenderedPrompt:
        check_text(prompt.text, "prompt")
        self._check_length(prompt.text, "prompt")
        ids = self._tokenizer.encode(prompt.text, prompt.add_special_tokens)
        if prompt.add_special_tokens:
            ids = self._with_one_bos(ids)
        return RenderedPrompt(_not_empty(ids, "prompt"), prompt.text)

    def _render_chat(self, prompt: ChatPrompt) -> RenderedPrompt:
        if self._template is None:
            raise RequestError(
                f"the model {self._model.name} has no chat template; use /v1/completions, or start the server with "
                "renderer.chat_template=<file>",
                param="messages",
                code="no_chat_template",
            )
        text = self._apply(self._template, prompt)
        check_text(text, "messages")
        self._check_length(text, "messages")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return RenderedPrompt(_not_empty(self._with_one_bos(ids), "messages"), text)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse what no tokenization can fit into the context: the tokenizer needs about 150 bytes per token."""
        limit = self._model.max_model_len * self._tokenizer.max_token_length
        if len(text) > limit:
            raise RequestError(
                f"{param}: {len(text)} characters cannot fit into the context of {self._model.max_model_len} tokens "
                f"(at most {limit} characters)",
                param=param,
                code="context_length_exceeded",
            )

    def _apply(self, template: ChatTemplate, prompt: ChatPrompt) -> str:
        """continue_final_message takes the place of a generation prompt."""
        if not prompt.messages:
            raise RequestError("messages: at least one message is needed", param="messages", code="empty")
        _check_contents(prompt)
        if prompt.tools and not template.uses_tools:
            raise RequestError(
                f"tools: {NO_TOOLS.format(model=self._model.name)}",
                param="tools",
                code="unsupported",
            )
        kwargs = self._checked_kwargs(prompt.template_kwargs, template)
        messages = template_messages(prompt.messages, template.content_form)
        if not prompt.continue_final_message:
            return template.render(
                messages, add_generation_prompt=prompt.add_generation_prompt, tools=prompt.tools, kwargs=kwargs
            )
        if prompt.messages[-1].get("role") != "assistant":
            raise RequestError(
                "continue_final_message: the final message must be the assistant's", param="continue_final_message"
            )
        return template.render_open(messages, tools=prompt.tools, kwargs=kwargs)

    def _checked_kwargs(self, kwargs: Mapping[str, Any], template: ChatTemplate) -> Mapping[str, Any]:
        allowed = self._settings.template_kwargs
        if kwargs.get(EFFORT, "none") != "none" and not template.uses_reasoning_effort:
            raise RequestError(
                f"{EFFORT}: the chat template of {self._model.name} has no such variable; what it has instead, such as "
                "enable_thinking, goes into chat_template_kwargs",
                param=EFFORT,
                code="unsupported",
            )
        for name in kwargs:
            if name in RESERVED_KWARGS:
                reason = "is reserved"
            elif name not in allowed:
                reason = f"is not allowed{near_matches(name, allowed)} (setting renderer.template_kwargs)"
            else:
                continue
            raise RequestError(
                f"chat_template_kwargs: {name[:64]!a} {reason}", param="chat_template_kwargs", code="reserved_key"
            )
        return kwargs

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        if not self._tokenizer.adds_bos or bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos, *ids[start:]]


class TokenIds:
    """Token ids only: for clients that tokenize themselves. No template is read and no prompt text is accepted."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: RendererContext) -> None:
        self._settings = settings
        self._model = context.model
        self._tokenizer = context.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def render(self, prompt: Prompt) -> RenderedPrompt:
        if isinstance(prompt, TokenPrompt):
            return _render_token_ids(prompt, self._model.vocab_size)
        param = "prompt" if isinstance(prompt, TextPrompt) else "messages"
        raise RequestError(
            f"{param}: the renderer `token_ids` takes token ids only; the renderer `text` supports text and chat",
            param=param,
            code="unsupported",
        )

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return prepare_params(params, self._model, self._tokenizer)


def _check_contents(prompt: ChatPrompt) -> None:
    """Many templates would write a null content as the word None."""
    for index, message in enumerate(prompt.messages):
        if message.get("content") is None and not (message.get("role") == "assistant" and message.get("tool_calls")):
            raise RequestError(
                f"messages[{index}].content: only an assistant message with tool calls can go without content",
                param="messages",
                code="invalid_value",
            )


def _render_token_ids(prompt: TokenPrompt, vocab_size: int) -> RenderedPrompt:
    check_token_ids(prompt.token_ids, vocab_size, "prompt")
    return RenderedPrompt(_not_empty(list(prompt.token_ids), "prompt"))


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError(
            f"{param}: an empty prompt has nothing to continue; the model needs at least one token",
            param=param,
            code="empty",
        )
    return ids
