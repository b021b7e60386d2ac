"""`llama3_json`: calls as JSON objects, `{"name": …, "parameters": {…}}`, as Llama 3.1, 3.2 and 3.3 write them.

An answer begins with one, or one stands behind `<|python_tag|>`; several are separated by `;`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.tool_parser import ToolParserContext
from plugins.tool_parsers.call_reader import CallKeys, CallReader
from plugins.tool_parsers.call_stream import CallStream
from plugins.tool_parsers.structures import Wording, structural_tag

MARKER = "<|python_tag|>"
BARE = '{"name": "'
_KEYS = CallKeys(arguments=("parameters", "arguments"), idle=("type",), needs_arguments=True)
_WORDING = Wording('{{"name": {name}, "parameters": ', "}", BARE, "; ")


class Llama3Json:
    """Any number of calls, and content around them. An object that is no call of these tools is content.

    Within an answer an object is looked at where it begins as these models write a call, `{"name": "`.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (MARKER,)

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> Llama3Stream:
        return Llama3Stream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        return structural_tag(_WORDING, tools, choice, parallel)


class Llama3Stream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (MARKER, BARE)

    def _read_start(self, text: str, at: int) -> int:
        at = self._skip_blank(text, at)
        if at < len(text) and text[at] == "{":
            self._begin(CallReader(self.names, _KEYS))
        elif at < len(text):
            self._go(self._read_content, at)
        return at

    def _opened(self, marker: str) -> None:
        reader = CallReader(self.names, _KEYS)
        if marker == BARE:
            reader.feed(marker, 0)
        self._begin(reader, "" if marker == BARE else marker)

    def _read_after(self, text: str, at: int) -> int:
        at = self._skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] == ";":
            self._begin(CallReader(self.names, _KEYS), ";")
            return at + 1
        if text[at] == "{":
            self._begin(CallReader(self.names, _KEYS))
            return at
        return self._go(self._read_content, at)
