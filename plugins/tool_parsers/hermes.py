"""`hermes`: calls as JSON between tags, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The format is that of NousResearch's Hermes models; Qwen 2.5 and Qwen 3 write the same.
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

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_KEYS = CallKeys()
_WORDING = Wording('<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>", OPEN, "\n")


class Hermes:
    """Any number of calls, and content around them.

    What stands between tags and is no call of these tools is content, tags included. Arguments are told as they come, from
    their first value on; where they turn out to be no JSON after that, the rest is content. A closing tag may be missing.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (OPEN, CLOSE)

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> HermesStream:
        return HermesStream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        return structural_tag(_WORDING, tools, choice, parallel)


class HermesStream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (OPEN,)

    def _opened(self, marker: str) -> None:
        self._begin(CallReader(self.names, _KEYS), marker)

    def _read_after(self, text: str, at: int) -> int:
        return self._read_closer(text, at, CLOSE)
