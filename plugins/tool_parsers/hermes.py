"""`hermes`: calls as JSON between tags, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The format is that of NousResearch's Hermes models; Qwen 2.5 and Qwen 3 write the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.stages.tool_parser import ParsedText, ToolCallDelta, ToolParserContext
from plugins.tool_parsers.call_reader import WHITE_SPACE, CallReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Hermes:
    """Any number of calls, and content around them.

    What stands between tags and is no call is content, tags included. Arguments are told as they come, from their first
    value on; where they turn out to be no JSON after that, the rest is content. White space between a call and its
    tags, the next call, or an end of the text belongs to the format.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> HermesStream:
        """Whatever name a model writes is told: whether there is such a tool is for the client to see."""
        return HermesStream()


class Place(Enum):
    """Where in the text a stream stands."""

    CONTENT = "content"
    CALL = "call"  # after an opening tag
    CLOSING = "closing"  # after a whole call, before its closing tag


class HermesStream:
    """`core.stages.tool_parser.ToolStream`."""

    def __init__(self) -> None:
        self._place = Place.CONTENT
        self._partial = ""  # what may be the beginning of a tag
        self._blank: list[str] | None = []  # white space at the start of a stretch of content; None: it has begun
        self._reader = CallReader()
        self._num_calls = 0  # that were told of
        self._told = False  # the call in hand was
        self._content: list[str] = []  # of this push
        self._calls: list[ToolCallDelta] = []  # of this push

    def push(self, text: str) -> ParsedText:
        text, self._partial = self._partial + text, ""
        at = 0
        while at < len(text):
            match self._place:
                case Place.CONTENT:
                    at = self._read_content(text, at)
                case Place.CALL:
                    at = self._read_call(text, at)
                case Place.CLOSING:
                    at = self._read_closing(text, at)
        return self._parsed()

    def finish(self) -> ParsedText:
        if self._place is Place.CALL:
            self._give_up_call()
        elif self._place is Place.CONTENT:
            self._add_content(self._partial)
        if self._blank and not self._num_calls:
            self._content += self._blank
        return self._parsed()

    def _parsed(self) -> ParsedText:
        parsed = ParsedText("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def _read_content(self, text: str, at: int) -> int:
        start = text.find(OPEN, at)
        if start >= 0:
            self._add_content(text[at:start])
            self._place, self._reader, self._told = Place.CALL, CallReader(), False
            return start + len(OPEN)
        end = len(text) - _overlap(text, at, OPEN)
        self._add_content(text[at:end])
        self._partial = text[end:]
        return len(text)

    def _read_call(self, text: str, at: int) -> int:
        end = self._reader.feed(text, at)
        self._tell_call()
        if self._reader.failed:
            self._give_up_call()
            self._place = Place.CONTENT
        elif self._reader.done:
            self._place = Place.CLOSING
        return end

    def _read_closing(self, text: str, at: int) -> int:
        start = at
        while at < len(text) and text[at] in WHITE_SPACE:
            at += 1
        self._add_content(text[start:at])
        if text.startswith(CLOSE, at):
            self._place, self._blank = Place.CONTENT, []
            return at + len(CLOSE)
        if CLOSE.startswith(text[at:]):
            self._partial = text[at:]
            return len(text)
        self._place = Place.CONTENT  # a call without its closing tag
        return at

    def _add_content(self, text: str) -> None:
        if self._blank is None:
            self._content.append(text)
        elif not text.strip(WHITE_SPACE):
            self._blank.append(text)
        else:
            self._content += [*self._blank, text]
            self._blank = None

    def _tell_call(self) -> None:
        reader = self._reader
        if reader.name is None or not (reader.certain or reader.done):
            return
        arguments = reader.new_arguments()
        if not self._told:
            self._calls.append(ToolCallDelta(self._num_calls, name=reader.name, arguments=arguments))
            self._num_calls += 1
            self._told = True
            self._blank = []  # white space before the call; what comes after it is a new stretch
        elif arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, arguments=arguments))

    def _give_up_call(self) -> None:
        """It is no call, or not a whole one: what was not told of it is content."""
        self._add_content(self._reader.after_arguments() if self._told else OPEN + self._reader.text)


def _overlap(text: str, at: int, tag: str) -> int:
    """Length of the longest end of `text[at:]` that is a beginning of `tag`, the whole of it left out."""
    for length in range(min(len(tag) - 1, len(text) - at), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
