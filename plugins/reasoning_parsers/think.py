"""`think`: reasoning between tags before the answer, `<think>…</think>`.

DeepSeek R1 began it; Qwen 3, QwQ and many others write the same, some with other words in the tags.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from core.stages.reasoning_parser import ReasoningParserContext, ReasoningSpan, SplitText
from plugins.reasoning_parsers.markers import WHITE_SPACE, BlankEnds, overlap


class Think:
    """What stands between the tags at the start of an answer is reasoning; later tags are content like any text.

    Without the closing tag all after the opening one is reasoning. White space beside the tags belongs to the format.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        begin: str = Field(default="<think>", min_length=1, max_length=64, description="what opens the reasoning")
        end: str = Field(default="</think>", min_length=1, max_length=64, description="what closes it")
        opened: bool | Literal["auto"] = Field(
            default="auto",
            description="whether the chat template has opened it before the answer begins; auto: where the prompt ends so",
        )

    def __init__(self, settings: Settings, context: ReasoningParserContext):
        self._settings = settings

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self._settings.begin, self._settings.end

    def stream(self, prompt: str) -> ThinkStream:
        settings = self._settings
        place = Place.CONTENT if self._is_closed(prompt) else Place.START
        return ThinkStream(settings.begin, settings.end, place, opened=self._is_open(prompt))

    def span(self, prompt: str) -> ReasoningSpan | None:
        if self._is_closed(prompt):
            return None
        return ReasoningSpan("" if self._is_open(prompt) else self._settings.begin, self._settings.end)

    def _is_open(self, prompt: str) -> bool:
        opened = self._settings.opened
        return prompt.rstrip(WHITE_SPACE).endswith(self._settings.begin) if opened == "auto" else opened

    def _is_closed(self, prompt: str) -> bool:
        """A template closes it at once where a request wants none (`enable_thinking: false`)."""
        return prompt.rstrip(WHITE_SPACE).endswith(self._settings.end)


class Place(Enum):
    """Where in the text a stream stands."""

    START = "start"
    REASONING = "reasoning"
    AFTER = "after"  # the closing tag: white space still belongs to it
    CONTENT = "content"


class ThinkStream:
    """`core.stages.reasoning_parser.ReasoningStream`. `opened`: the prompt has the opening tag; the text may repeat it."""

    def __init__(self, begin: str, end: str, place: Place, *, opened: bool):
        self._begin, self._end = begin, end
        self._place = place
        self._opened = opened
        self._partial = ""  # what may be the beginning of a tag
        self._blank: list[str] = []  # white space at the start of the text
        self._inside = BlankEnds()

    def push(self, text: str) -> SplitText:
        text, self._partial = self._partial + text, ""
        reasoning = content = ""
        if self._place is Place.START:
            text = self._read_start(text)
        if self._place is Place.REASONING:
            reasoning, text = self._read_reasoning(text)
        if self._place is Place.AFTER:
            text = text.lstrip(WHITE_SPACE)
            self._place = Place.CONTENT if text else Place.AFTER
        if self._place is Place.CONTENT:
            content = text
        return SplitText(reasoning, content)

    def finish(self) -> SplitText:
        held, self._partial = self._partial, ""
        if self._place is Place.REASONING or (self._place is Place.START and self._opened):
            return SplitText(reasoning=self._inside.finish(held))
        return SplitText(content="".join(self._blank) + held if self._place is Place.START else held)

    def _read_start(self, text: str) -> str:
        """What is left of the text: behind the opening tag, or all where there is none."""
        rest = text.lstrip(WHITE_SPACE)
        self._blank.append(text[: len(text) - len(rest)])
        if len(rest) < len(self._begin) and self._begin.startswith(rest):
            self._partial = rest
            return ""
        if rest.startswith(self._begin):
            self._place = Place.REASONING
            return rest.removeprefix(self._begin)
        self._place = Place.REASONING if self._opened else Place.CONTENT
        return "".join(self._blank) + rest

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning in it, and what follows the closing tag."""
        inside, tag, rest = text.partition(self._end)
        if tag:
            self._place = Place.AFTER
            return self._inside.push(inside), rest
        held = overlap(text, self._end)
        self._partial = text[len(text) - held :]
        return self._inside.push(text[: len(text) - held]), ""
