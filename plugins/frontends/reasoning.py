"""Reasoning in an answer: told apart from its content, and counted. What frontends share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from core.model.tokenizer import Tokenizer
from core.outputs import CompletionOutput
from core.stages.frontend import FrontHalf, GenerateRequest
from core.stages.reasoning_parser import AllContent, ReasoningParser, ReasoningStream, SplitText, prompt_end
from core.stages.renderer import ChatPrompt


@dataclass(slots=True)
class ReasoningOfChoice:
    """One choice's text on its way through the reasoning parser."""

    parser: ReasoningParser
    tokenizer: Tokenizer
    stream: ReasoningStream | None = None  # made with the first text: only then is the prompt known
    num_tokens: int = 0  # of the reasoning with its markers
    _num_held: int = 0  # tokens whose text has not come out: it may be a marker's
    _in_reasoning: bool = False  # what came out last was

    def take(self, output: CompletionOutput, prompt_token_ids: Sequence[int]) -> SplitText:
        """The next text. Raises GenerationError where the parser fails."""
        if self.stream is None:
            self.stream = self.parser.stream(prompt_end(self.tokenizer, prompt_token_ids))
        ended = output.finish_reason is not None
        told = [self.stream.push(output.text), *([self.stream.finish()] if ended else ())]
        split = SplitText("".join(part.reasoning for part in told), "".join(part.content for part in told))
        self._count(split, len(output.token_ids), ended)
        return split

    def _count(self, split: SplitText, num_tokens: int, ended: bool) -> None:
        """By the tokens that brought the text: encoding it again would hold up the event loop.

        Markers, and the white space beside them, are held until it is clear what is behind them.
        """
        num_chars = len(split.reasoning) + len(split.content)
        if not num_chars:
            self._num_held += num_tokens
            if not ended:
                return
        self._in_reasoning = self._in_reasoning or bool(split.reasoning)
        if self._in_reasoning:
            self.num_tokens += self._num_held + round(num_tokens * len(split.reasoning) / max(num_chars, 1))
        self._num_held = 0
        self._in_reasoning = self._in_reasoning and not split.content


def reasoning_of(front: FrontHalf, request: GenerateRequest) -> ReasoningOfChoice:
    """For one choice. Of a chat alone: what continues a text is no answer."""
    stream = None if isinstance(request.prompt, ChatPrompt) else AllContent()
    return ReasoningOfChoice(front.reasoning_parser, front.renderer.tokenizer, stream)


DIM, UNDIM = "\x1b[2m", "\x1b[22m"


class Printed:
    """An answer on standard output: its reasoning is dimmed where that is a terminal, and left out elsewhere."""

    def __init__(self) -> None:
        self._shows_reasoning = sys.stdout.isatty()
        self._dimmed = False

    def add(self, split: SplitText) -> None:
        if split.reasoning and self._shows_reasoning:
            print("" if self._dimmed else DIM, split.reasoning, sep="", end="", flush=True)
            self._dimmed = True
        if split.content:
            self._undim("\n\n")
            print(split.content, end="", flush=True)

    def _undim(self, end: str) -> None:
        if self._dimmed:
            print(UNDIM, end=end, flush=True)
        self._dimmed = False


@contextmanager
def printed() -> Iterator[Printed]:
    """The terminal is left as it was, however the answer ends."""
    answer = Printed()
    try:
        yield answer
    finally:
        answer._undim("")


def with_shown(request: GenerateRequest, tokenizer: Tokenizer, markers: Iterable[str]) -> GenerateRequest:
    """Its text has those markers that are special tokens, for parsers to read."""
    found = {tokenizer.token_id(marker) for marker in markers}
    shown = tuple(sorted(token_id for token_id in found if token_id in tokenizer.special_token_ids))
    return replace(request, params=msgspec.structs.replace(request.params, shown_token_ids=shown)) if shown else request
