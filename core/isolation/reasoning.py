"""The reasoning parser as frontends see it: what it does wrong fails one answer, and switches it off when it happens often."""

from __future__ import annotations

from collections.abc import Sequence

from core.isolation.front import Guard, MalformedError, is_encodable, kind_of
from core.isolation.streams import CheckedStream, opened
from core.isolation.tools import markers_of
from core.stages.reasoning_parser import AllContent, ReasoningParser, ReasoningSpan, ReasoningStream, SplitText

MAX_MARKER_CHARS = 256
_NOTHING = SplitText()


class GuardedReasoningParser:
    """`core.stages.reasoning_parser.ReasoningParser`. Raises GenerationError that names the component.

    Once it is switched off all text is content: an answer that is not split is better than none.
    """

    def __init__(self, parser: ReasoningParser, guard: Guard):
        self._parser = parser
        self._guard = guard

    def stream(self, prompt: str) -> ReasoningStream:
        if self._guard.is_off:
            return AllContent()
        return CheckedStream(self._guard.call(self._opened, prompt), self._guard, _check, _NOTHING)

    def span(self, prompt: str) -> ReasoningSpan | None:
        return None if self._guard.is_off else self._guard.call(self._checked_span, prompt)

    @property
    def special_tokens(self) -> Sequence[str]:
        return () if self._guard.is_off else self._guard.call(markers_of, self._parser)

    def _opened(self, prompt: str) -> ReasoningStream:
        return opened(self._parser.stream(prompt), "ReasoningStream")

    def _checked_span(self, prompt: str) -> ReasoningSpan | None:
        span = self._parser.span(prompt)
        if span is None:
            return None
        if type(span) is not ReasoningSpan or not (_is_marker(span.begin) and _is_marker(span.end) and span.end):
            raise MalformedError("span returned what is no ReasoningSpan with texts, and an end")
        return span


def _check(split: object) -> SplitText:
    if type(split) is not SplitText:
        raise MalformedError(f"it returned {kind_of(split)}, not a SplitText")
    for text in (split.reasoning, split.content):
        if type(text) is not str or not is_encodable(text):
            raise MalformedError("it returned a SplitText with what is no text")
    return split


def _is_marker(text: object) -> bool:
    return type(text) is str and len(text) <= MAX_MARKER_CHARS and is_encodable(text)
