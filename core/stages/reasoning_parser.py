"""Reasoning parsers: what of a model's answer is thought, and what is told; also while it streams (used by stage 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer

PROMPT_END = 64
"""Tokens at the end of a prompt that a parser is shown."""


@dataclass(frozen=True, slots=True)
class ReasoningParserContext:
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class SplitText:
    """What is certain after a piece of text. Both are deltas."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """Where in an output the reasoning is. A grammar of the content begins behind `end` (`core.request.GrammarSpec.after`)."""

    begin: (
        str  # what an output with reasoning begins with; "": the prompt has begun it, and all up to `end` is reasoning
    )
    end: str


class ReasoningStream(Protocol):
    """One choice's text. What all that comes out adds up to depends on the whole text only, not on its pieces.

    Nothing is lost but the markers, and white space beside them.
    """

    def push(self, text: str) -> SplitText:
        """The next piece. Text that may turn out to be a marker is held back. Never raises on any text; in time that is linear
        in the text."""
        ...

    def finish(self) -> SplitText:
        """The text has ended: what is held back comes out. Called once, after all pieces."""
        ...


class ReasoningParser(Protocol):
    """Config group `reasoning_parser`. Called on the event loop: must not block.

    One that splits `provides` the word "reasoning"; with another one all text is content. After `plugins.quarantine_after`
    failures it is switched off, and all text is content, too.

    Example::

        from core.stages.reasoning_parser import ReasoningParserContext, ReasoningSpan, SplitText
        from pydantic import BaseModel, ConfigDict, Field


        class FirstLine:  # the first line is reasoning where it begins with a mark
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                mark: str = Field(default="#", min_length=1, max_length=16)

            def __init__(self, settings: Settings, context: ReasoningParserContext):
                self._mark = settings.mark

            def span(self, prompt: str) -> ReasoningSpan | None:
                return ReasoningSpan(self._mark, "\\n")

            def stream(self, prompt: str) -> "Line":
                return Line(self._mark)

            @property
            def special_tokens(self) -> tuple[str, ...]:
                return (self._mark,)


        class Line:
            def __init__(self, mark: str):
                self._mark, self._held, self._is_reasoning = mark, "", True

            def push(self, text: str) -> SplitText:
                if not self._is_reasoning:
                    return SplitText(content=text)
                self._held += text
                if not self._mark.startswith(self._held[: len(self._mark)]):
                    return self._content()
                line, end, rest = self._held.partition("\\n")
                if not end or not line.startswith(self._mark):
                    return SplitText()
                self._held, self._is_reasoning = "", False
                return SplitText(line.removeprefix(self._mark), rest)

            def finish(self) -> SplitText:
                if self._is_reasoning and self._held.startswith(self._mark):
                    return SplitText(self._held.removeprefix(self._mark))
                return self._content()

            def _content(self) -> SplitText:
                held, self._held, self._is_reasoning = self._held, "", False
                return SplitText(content=held)
    """

    def stream(self, prompt: str) -> ReasoningStream:
        """A new stream for one choice. `prompt`: the end of the rendered prompt (`PROMPT_END` tokens) with its special tokens,
        for a template may have begun the reasoning, or ended it."""
        ...

    def span(self, prompt: str) -> ReasoningSpan | None:
        """Where the reasoning of an output to this prompt is; None: it has none. The same as `stream` would find."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Markers that may be special tokens of a model. They are shown in the text of an answer that is split, whatever its
        request's `skip_special_tokens` says. Optional: none without it."""
        ...


def prompt_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """What `stream` and `span` are shown of a prompt."""
    return tokenizer.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)


class AllContent:
    """The `ReasoningStream` of text that is not split."""

    def push(self, text: str) -> SplitText:
        return SplitText(content=text)

    def finish(self) -> SplitText:
        return SplitText()


class NoReasoning:
    """`reasoning_parser: none`. All text is content."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: ReasoningParserContext):
        pass

    def stream(self, prompt: str) -> AllContent:
        return AllContent()

    def span(self, prompt: str) -> None:
        return None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ()
