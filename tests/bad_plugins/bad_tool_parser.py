"""Tool parsers that each break one promise of `core.stages.tool_parser`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from core.stages.tool_parser import ParsedText, ToolCallDelta

provides = ("tools",)
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Parser:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        pass


class Held:
    """Holds back what may become a marker, and forgets it at the end."""

    def __init__(self):
        self._text = ""

    def push(self, text):
        self._text += text
        at = next((n for n in range(len(OPEN), 0, -1) if self._text.endswith(OPEN[:n])), 0)
        content, self._text = self._text[: len(self._text) - at], self._text[len(self._text) - at :]
        return ParsedText(content)

    def finish(self):
        return ParsedText()


class LosesText(Parser):
    """Text that looked like the beginning of a call is gone when no call came."""

    caught_by = "test_what_is_no_call_is_content"

    def stream(self, tools):
        return Held()


class Pieces:
    """Looks for a marker in each piece by itself."""

    def push(self, text):
        if OPEN in text:
            before, _, rest = text.partition(OPEN)
            _, _, after = rest.partition(CLOSE)
            return ParsedText(before + after, (ToolCallDelta(0, name="weather", arguments="{}"),))
        return ParsedText(text)

    def finish(self):
        return ParsedText()


class DependsOnPieces(Parser):
    """A marker that is cut in two is content."""

    caught_by = "test_streamed_equals_whole_under_any_chunking"

    def stream(self, tools):
        return Pieces()
