"""Stage 2, renderer: chat template, tokenizer, multimodal parts -> token ids (R2.1, R2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from core.request import SamplingParams

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages in OpenAI's shape, already validated by the frontend (roles, text parts only)."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # from the allow-list only
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids straight from the client (R2.2); only their range is checked."""

    token_ids: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    token_ids: list[int]
    text: str | None = None  # the rendered text, where the prompt was not ids


@dataclass(frozen=True, slots=True)
class RendererContext:
    model: ModelSpec
    tokenizer: Tokenizer


class Renderer(Protocol):
    """Config group `renderer`. Called in worker threads of the front process: must be thread-safe.

    Example::

        from dataclasses import replace

        from core.stages.renderer import ChatPrompt, Prompt, RenderedPrompt, RendererContext
        from core.stages.text_renderer import Text
        from pydantic import Field


        class Polite(Text):  # its template, tokenizer and checks of parameters
            class Settings(Text.Settings):
                system: str = Field(default="Be polite.", description="of chats that bring no system message")

            def __init__(self, settings: Settings, context: RendererContext):
                super().__init__(settings, context)
                self._system = {"role": "system", "content": settings.system}

            def render(self, prompt: Prompt) -> RenderedPrompt:
                if isinstance(prompt, ChatPrompt) and prompt.messages and prompt.messages[0].get("role") != "system":
                    prompt = replace(prompt, messages=[self._system, *prompt.messages])
                return super().render(prompt)
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """Raises RequestError naming the field (`messages`, `prompt`) for bad input."""
        ...

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """Resolve what needs the vocabulary: bad_words -> bad_words_token_ids; ids checked against the vocabulary.

        Raises RequestError naming the parameter.
        """
        ...
