"""`mistral`: calls behind `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

Mistral's models wrote `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]` up to tokenizer v7; from v11 on they write
`[TOOL_CALLS]name{…}`, or `[TOOL_CALLS]name[ARGS]{…}` with an optional `[CALL_ID]…` before it. All are read.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from core.request import GrammarSpec
from core.stages.tool_parser import ToolParserContext
from plugins.tool_parsers.call_reader import Ahead, CallKeys, CallReader, NotACallError, Scan, expect, visible
from plugins.tool_parsers.call_stream import CallStream
from plugins.tool_parsers.structures import Wording, list_of_calls, structural_tag

MARKER = "[TOOL_CALLS]"
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_WORD_CHARS = 64
_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_KEYS = CallKeys(call_id="id")
_NAMED = {
    "named": Wording("[TOOL_CALLS]{word}", "", MARKER, ""),
    "args": Wording("[TOOL_CALLS]{word}[ARGS]", "", MARKER, ""),
}


class Mistral:
    """Any number of calls, and content around them. What follows a marker and is no call of these tools is content."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        form: Literal["list", "named", "args"] = Field(
            default="list",
            description="how calls are written where a grammar has them made: [{…}], name{…} or name[ARGS]{…}; read are all",
        )

    special_tokens = (MARKER, _ID, _ARGS)

    def __init__(self, settings: Settings, context: ToolParserContext):
        self._form = settings.form

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> MistralStream:
        return MistralStream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        if self._form == "list":
            return list_of_calls(MARKER, tools, choice, parallel)
        return structural_tag(_NAMED[self._form], tools, choice, parallel)


class MistralStream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (MARKER,)

    def _opened(self, marker: str) -> None:
        self._first = FirstCall(self.names)
        self._begin(self._first, marker)

    def _read_after(self, text: str, at: int) -> int:
        if not self._first.in_list:
            return self._go(self._read_content, at)
        at = self._skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._begin(CallReader(self.names, _KEYS), ",")
        elif text[at] == "]":
            self._blank = []
            self._read = self._read_content
        else:
            return self._go(self._read_content, at)
        return at + 1


class FirstCall(CallReader):
    """What follows a marker, which says the form."""

    def __init__(self, names: Collection[str]):
        self.in_list = False
        super().__init__(names, _KEYS)

    def scan(self) -> Scan:
        char = yield from visible((yield))
        if char == "[":
            self.in_list = True
            yield from super().scan()
            return
        word: list[str] = []
        while char in NAME_CHARS and len(word) < MAX_WORD_CHARS:
            word.append(char)
            char = yield
        self.note_name("".join(word))
        self.begin_object((yield from self._behind_name(char)))

    def _behind_name(self, char: str) -> Ahead:
        """The first character of the arguments."""
        if char == "[":
            tag = yield from _tag(char)
            if tag == _ID:
                self.call_id, char = yield from _until_bracket()
                tag = yield from _tag(char)
            if tag != _ARGS:
                raise NotACallError
            char = yield
        return (yield from visible(char))


def _tag(char: str) -> Ahead:
    found = [char]
    while char != "]":
        char = yield
        found.append(char)
        if len(found) > len(_ID):
            raise NotACallError
    return "".join(found)


def _until_bracket() -> Generator[None, str, tuple[str, str]]:
    """A call's id, and the bracket behind it."""
    found: list[str] = []
    while (char := (yield)) in NAME_CHARS and len(found) < MAX_WORD_CHARS:
        found.append(char)
    if not found:
        raise NotACallError
    expect(char, "[")
    return "".join(found), char
