"""Reasoning parsers that each break one promise of `core.stages.reasoning_parser`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from core.stages.reasoning_parser import ReasoningSpan, SplitText

provides = ("reasoning",)
OPEN, CLOSE = "<think>", "</think>"


class Parser:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        pass

    def span(self, prompt):
        return ReasoningSpan(OPEN, CLOSE)


class Pieces:
    """Looks for a marker in each piece by itself."""

    def push(self, text):
        before, _, rest = text.partition(OPEN)
        reasoning, closed, after = rest.partition(CLOSE)
        return SplitText(reasoning, before + after) if closed else SplitText(content=text)

    def finish(self):
        return SplitText()


class DependsOnPieces(Parser):
    """A marker that is cut in two is content."""

    caught_by = "test_streamed_equals_whole_under_any_chunking"

    def stream(self, prompt):
        return Pieces()


class Held:
    """Holds back what may become a marker, and forgets it at the end."""

    def __init__(self):
        self._text = ""

    def push(self, text):
        self._text += text
        if OPEN.startswith(self._text[: len(OPEN)]) or self._text.startswith(OPEN):
            return SplitText()
        content, self._text = self._text[:-1], self._text[-1:]
        return SplitText(content=content)

    def finish(self):
        return SplitText()


class LosesText(Parser):
    """The last character is gone."""

    caught_by = "test_text_without_markers_comes_out_whole"

    def stream(self, prompt):
        return Held()


class Whole:
    def __init__(self):
        self._text = ""

    def push(self, text):
        self._text += text
        return SplitText()

    def finish(self):
        reasoning, closed, content = self._text.removeprefix(OPEN).partition(CLOSE)
        if self._text.startswith(OPEN) and closed:
            return SplitText(reasoning, content)
        return SplitText(content=self._text)


class NothingComesBeforeTheEnd(Parser):
    """The client waits for the whole answer."""

    caught_by = "test_text_comes_while_it_is_written"

    def stream(self, prompt):
        return Whole()


class ForgetsItsMarkers(Parser):
    """They depend on what was split before."""

    caught_by = "test_markers_are_a_few_texts"

    def __init__(self, settings, context):
        self._num_streams = 0

    def stream(self, prompt):
        self._num_streams += 1
        return Whole()

    @property
    def special_tokens(self):
        return (CLOSE,) if self._num_streams else (OPEN, CLOSE)
