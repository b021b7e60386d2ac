"""`pythonic`: calls as a list in Python's notation, `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 write them.

An answer begins with it, or it stands between `<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.tool_parser import ToolParserContext
from plugins.tool_parsers.call_reader import NotACallError, Scan, ScannedCall, expect, visible
from plugins.tool_parsers.call_stream import CallStream
from plugins.tool_parsers.keyword_grammar import keyword_grammar
from plugins.tool_parsers.literal_reader import KeywordReader

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_NAME_CHARS = 64


class Pythonic:
    """Any number of calls, and content around them. A list of anything else is content, and so is a call with arguments that
    have no names."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (OPEN, CLOSE)

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> PythonicStream:
        return PythonicStream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        return keyword_grammar(tools, choice, parallel)


class PythonicStream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (OPEN,)

    def _read_start(self, text: str, at: int) -> int:
        at = self._skip_blank(text, at)
        if at < len(text) and text[at] == "[":
            self._begin(PythonCall(self.names, opens_list=True))
        elif at < len(text):
            self._go(self._read_content, at)
        return at

    def _opened(self, marker: str) -> None:
        self._begin(PythonCall(self.names, opens_list=True), marker)

    def _read_after(self, text: str, at: int) -> int:
        at = self._skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._begin(PythonCall(self.names, opens_list=False), ",")
            return at + 1
        if text[at] == "]":
            self._blank = []
            return self._go(self._read_close, at + 1)
        return self._go(self._read_content, at)

    def _read_close(self, text: str, at: int) -> int:
        return self._read_closer(text, at, CLOSE)


class PythonCall(ScannedCall):
    """`name(a=1)`, with the bracket before it where it is the first of a list."""

    def __init__(self, names: Collection[str], *, opens_list: bool):
        self._opens_list = opens_list
        super().__init__(names)

    def scan(self) -> Scan:
        char = yield from visible((yield))
        if self._opens_list:
            expect(char, "[")
            char = yield from visible((yield))
        name: list[str] = []
        while char in NAME_CHARS:
            name.append(char)
            if len(name) > MAX_NAME_CHARS:
                raise NotACallError
            char = yield
        self.note_name("".join(name))
        expect((yield from visible(char)), "(")
        self.begin_arguments(KeywordReader())
