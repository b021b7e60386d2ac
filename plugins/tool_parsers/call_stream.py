"""What the streams of all formats share: content with markers in it, and calls that are told while they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from core.stages.tool_parser import ParsedText, ToolCallDelta
from plugins.tool_parsers.call_reader import Reader
from plugins.tool_parsers.json_reader import WHITE_SPACE

_BLANK = re.compile(r"[ \t\n\r]*")


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


class CallStream:
    """`core.stages.tool_parser.ToolStream`. Each character is read once.

    A format says what its calls begin with (`markers`, anywhere in content; `_read_start`, at the start of the text), how
    one is read (`_opened`) and what follows one (`_read_after`). What stands where a call is due and is none is content, its
    marker included. White space between a call, its markers and an end of the text belongs to the format.
    """

    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self.names = names_of(tools)
        self._read: Callable[[str, int], int] = self._read_start
        self._find = re.compile("|".join(map(re.escape, self.markers)))
        self._partial = ""  # what may be the beginning of a marker
        self._is_closing = False  # it is of a closing one
        self._blank: list[str] | None = []  # white space at the start of a stretch of content; None: it has begun
        self._reader: Reader | None = None
        self._before = ""  # the call in hand: what is content with it where it is none
        self._told = False  # the call in hand was
        self._num_calls = 0  # that were told of
        self._content: list[str] = []  # of this push
        self._calls: list[ToolCallDelta] = []  # of this push

    def push(self, text: str) -> ParsedText:
        text, self._partial, self._is_closing = self._partial + text, "", False
        at = 0
        while at < len(text):
            at = self._read(text, at)
        return self._parsed()

    def finish(self) -> ParsedText:
        if self._reader is not None:
            self._give_up()
        if not self._is_closing:
            self._add_content(self._partial)
        if self._blank and not self._num_calls:
            self._content += self._blank
        return self._parsed()

    # --- what a format says ---

    def _read_start(self, text: str, at: int) -> int:
        """The start of the text. By default content."""
        return self._go(self._read_content, at)

    def _opened(self, marker: str) -> None:
        """A marker was found: usually `self._begin(reader, marker)`."""
        raise NotImplementedError

    def _read_after(self, text: str, at: int) -> int:
        """What follows a whole call."""
        raise NotImplementedError

    # --- what it has for that ---

    def _go(self, read: Callable[[str, int], int], at: int) -> int:
        """Go on with `read` from there."""
        self._read = read
        return at

    def _hold(self, text: str, at: int) -> int:
        """What is left of this piece may be the beginning of a marker."""
        self._partial = text[at:]
        return len(text)

    def _skip_blank(self, text: str, at: int) -> int:
        """White space that is content where no call is beside it."""
        match = _BLANK.match(text, at)
        assert match is not None  # it matches nothing at all
        self._add_content(text[at : match.end()])
        return match.end()

    def _begin(self, reader: Reader, before: str = "") -> None:
        """A call is due. `before`: what was taken for its sake."""
        self._reader, self._before, self._told = reader, before, False
        self._read = self._read_call

    def _read_closer(self, text: str, at: int, *closers: str) -> int:
        """White space and one of these markers, which may be missing; then content."""
        at = self._skip_blank(text, at)
        for closer in closers:
            if text.startswith(closer, at):
                self._blank = []
                return self._go(self._read_content, at + len(closer))
        if any(len(text) - at < len(closer) and closer.startswith(text[at:]) for closer in closers):
            self._is_closing = True
            return self._hold(text, at)
        return self._go(self._read_content, at)

    def _read_content(self, text: str, at: int) -> int:
        found = self._find.search(text, at)
        if found is not None:
            self._add_content(text[at : found.start()])
            self._opened(found[0])
            return found.end()
        end = len(text) - max(overlap(text, at, marker) for marker in self.markers)
        self._add_content(text[at:end])
        return self._hold(text, end)

    def _read_call(self, text: str, at: int) -> int:
        reader = self._reader
        assert reader is not None
        end = reader.feed(text, at)
        self._tell(reader)
        if reader.failed:
            self._give_up()
            self._read = self._read_content
        elif reader.done:
            self._reader, self._read = None, self._read_after
        return end

    def _tell(self, reader: Reader) -> None:
        if reader.name is None or not reader.certain:
            return
        arguments = reader.new_arguments()
        if not self._told:
            delta = ToolCallDelta(self._num_calls, reader.call_id, reader.name, arguments)
            self._num_calls, self._told = self._num_calls + 1, True
            self._blank = []  # white space before the call; what comes after it is a new stretch
            self._calls.append(delta)
        elif arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, arguments=arguments))

    def _give_up(self) -> None:
        """It is no call, or not a whole one: what was not told of it is content."""
        reader, self._reader = self._reader, None
        assert reader is not None
        self._add_content(reader.after_arguments() if self._told else self._before + reader.text)

    def _add_content(self, text: str) -> None:
        if self._blank is None:
            self._content.append(text)
        elif not text.strip(WHITE_SPACE):
            self._blank.append(text)
        else:
            self._content += [*self._blank, text]
            self._blank = None

    def _parsed(self) -> ParsedText:
        parsed = ParsedText("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return parsed


def overlap(text: str, at: int, marker: str) -> int:
    """Length of the longest end of `text[at:]` that is a beginning of `marker`, the whole of it left out."""
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
