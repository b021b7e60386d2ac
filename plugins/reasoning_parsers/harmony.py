"""`harmony`: the channels of gpt-oss, `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.

What is said in the channel analysis is reasoning; final, and commentary to nobody, are content. A message to a tool stays as it
is written: the tool parser `harmony` finds it in the content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from core.stages.reasoning_parser import ReasoningParserContext, ReasoningSpan, SplitText
from plugins.reasoning_parsers.markers import overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FINAL = "<|channel|>final<|message|>"
MAX_HEADER_CHARS = 512
_OPENING = (START, CHANNEL)
_MARKERS = (*_OPENING, *ENDS)
_ANY = re.compile("|".join(map(re.escape, _MARKERS)))
_HEADER = re.compile("|".join(map(re.escape, _OPENING)))
_WORD = re.compile(r"[a-z]*")


class Harmony:
    """A text without channels is content. So is what looks like a header and is none."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

    def __init__(self, settings: Settings, context: ReasoningParserContext):
        pass

    def stream(self, prompt: str) -> HarmonyStream:
        return HarmonyStream(_begun(prompt))

    def span(self, prompt: str) -> ReasoningSpan | None:
        return None if _channel(_begun(prompt)) == "final" else ReasoningSpan("", FINAL)


class HarmonyStream:
    """`core.stages.reasoning_parser.ReasoningStream`. `begun`: what of its first message's header the prompt has."""

    def __init__(self, begun: str = ""):
        self._partial = ""  # what may be the beginning of a marker
        self._header = ""  # the one that is read
        self._is_reasoning = False
        self._is_raw = False  # the message stays as it is written
        self._reasoning: list[str] = []  # of this push
        self._content: list[str] = []  # of this push
        self._read: Callable[[str, int], int] = self._read_outside
        if begun:
            self._begin_message(begun)

    def push(self, text: str) -> SplitText:
        text, self._partial = self._partial + text, ""
        at = 0
        while at < len(text):
            at = self._read(text, at)
        return self._split()

    def finish(self) -> SplitText:
        held = self._header + self._partial
        self._header = self._partial = ""
        self._say(held)
        return self._split()

    def _split(self) -> SplitText:
        split = SplitText("".join(self._reasoning), "".join(self._content))
        self._reasoning, self._content = [], []
        return split

    def _say(self, text: str) -> None:
        (self._reasoning if self._is_reasoning else self._content).append(text)

    def _read_outside(self, text: str, at: int) -> int:
        """Between messages: a header, or content that is in none."""
        found = _HEADER.search(text, at)
        if found is None:
            return self._hold(text, at, _OPENING)
        self._say(text[at : found.start()])
        return self._open(found[0], found.end())

    def _open(self, marker: str, at: int) -> int:
        self._header, self._read = marker, self._read_header
        return at

    def _read_header(self, text: str, at: int) -> int:
        """Some characters more of it: bounded, so that it costs no more than its length to look at it each time."""
        before, room = len(self._header), MAX_HEADER_CHARS - len(self._header)
        self._header += text[at : at + room]
        end = self._header.find(MESSAGE)
        if end >= 0:
            header, self._header = self._header[: end + len(MESSAGE)], ""
            self._begin_message(header)
            return at + len(header) - before
        if len(self._header) < MAX_HEADER_CHARS:
            return len(text)
        header, self._header = self._header, ""
        self._is_reasoning, self._read = False, self._read_outside
        self._say(header)
        return at + room

    def _begin_message(self, header: str) -> None:
        channel = _channel(header)
        self._is_raw = "to=" in header or channel not in ("analysis", "final", "commentary")
        self._is_reasoning = channel == "analysis" and not self._is_raw
        self._read = self._read_message
        if self._is_raw:
            self._say(header)

    def _read_message(self, text: str, at: int) -> int:
        found = _ANY.search(text, at)
        if found is None:
            return self._hold(text, at, _MARKERS)
        self._say(text[at : found.start()])
        if self._is_raw and found[0] in ENDS:
            self._say(found[0])
        self._is_reasoning, self._read = False, self._read_outside
        return found.end() if found[0] in ENDS else self._open(found[0], found.end())

    def _hold(self, text: str, at: int, markers: tuple[str, ...]) -> int:
        held = min(max(overlap(text, marker) for marker in markers), len(text) - at)
        self._say(text[at : len(text) - held])
        self._partial = text[len(text) - held :]
        return len(text)


def _begun(prompt: str) -> str:
    """A header at the end of a prompt, whose message the model goes on with."""
    tail = prompt[prompt.rfind(START) + len(START) :] if START in prompt else prompt
    header, marker, said = tail.rpartition(MESSAGE)
    if not marker or any(end in said for end in ENDS):
        return ""
    return header + marker


def _channel(header: str) -> str:
    _, marker, rest = header.rpartition(CHANNEL)
    found = _WORD.match(rest) if marker else None
    return found[0] if found else ""
