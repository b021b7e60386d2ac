"""`harmony`: calls as messages to a function, in the channels of gpt-oss.

`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`; the recipient may stand before the channel.
Everything else is content as it is written: the reasoning parser `harmony` makes plain text of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.tool_parser import AUTO, ToolParserContext
from plugins.tool_parsers.call_reader import NotACallError, Scan, ScannedCall, visible
from plugins.tool_parsers.call_stream import CallStream
from plugins.tool_parsers.structures import Wording, structural_tag

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CLOSERS = ("<|call|>", "<|end|>")
MAX_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"(?:^|[ \t])to=functions\.([^ \t<]+)")
_TO = "to="
_BEGIN = "<|channel|>commentary to=functions."
_TAIL = "{word} <|constrain|>json<|message|>"


class Harmony:
    """Any number of calls, and content around them. A message to no function of these tools is content."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (START, CHANNEL, MESSAGE, "<|constrain|>", *CLOSERS, "<|return|>")

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> HarmonyStream:
        return HarmonyStream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        """A turn has one call at most: the model ends it with `<|call|>`, an end of sequence."""
        if choice == AUTO:
            wording = Wording(_TAIL, "", "", None)
            spec = structural_tag(wording, tools, "required", False)
            return spec and msgspec.structs.replace(spec, after=_BEGIN, may_end=True)
        spec = structural_tag(Wording(_BEGIN + _TAIL, "", _BEGIN, None), tools, choice, False)
        opening, after = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        return spec and msgspec.structs.replace(spec, opening=opening, after=after)


class HarmonyStream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (START, CHANNEL)

    def _read_start(self, text: str, at: int) -> int:
        """The prompt ends with `<|start|>assistant`, so the text may begin within a header."""
        at = self._skip_blank(text, at)
        if text.startswith(_TO, at):
            self._begin(MessageCall(self.names))
        elif _TO.startswith(text[at:]):
            return self._hold(text, at)
        else:
            self._go(self._read_content, at)
        return at

    def _opened(self, marker: str) -> None:
        self._begin(MessageCall(self.names), marker)

    def _read_after(self, text: str, at: int) -> int:
        return self._read_closer(text, at, *CLOSERS)


class MessageCall(ScannedCall):
    """A header, and a message that is a JSON object."""

    def scan(self) -> Scan:
        header: list[str] = []
        while True:
            header.append((yield))
            if header[-1] == ">" and "".join(header[-len(MESSAGE) :]) == MESSAGE:
                break
            if len(header) > MAX_HEADER_CHARS:
                raise NotACallError
        found = _RECIPIENT.search("".join(header))
        if found is None:
            raise NotACallError
        self.note_name(found[1])
        self.begin_object((yield from visible((yield))))
