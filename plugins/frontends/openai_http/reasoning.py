"""Reasoning in an answer: told apart from its content, and counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.model.tokenizer import Tokenizer
from core.stages.reasoning_parser import ReasoningParser, ReasoningStream, SplitText, prompt_end


@dataclass(slots=True)
class ReasoningOfChoice:
    """One choice's text on its way through the reasoning parser. Raises GenerationError where that fails."""

    parser: ReasoningParser
    tokenizer: Tokenizer
    _stream: ReasoningStream | None = None  # made with the first text: only then is the prompt known
    _reasoning: list[str] = field(default_factory=list)

    def take(self, text: str, prompt_token_ids: Sequence[int], *, ended: bool) -> SplitText:
        """The next text; `ended`: there is no more."""
        if self._stream is None:
            self._stream = self.parser.stream(prompt_end(self.tokenizer, prompt_token_ids))
        told = [self._stream.push(text)]
        if ended:
            told.append(self._stream.finish())
        split = SplitText("".join(part.reasoning for part in told), "".join(part.content for part in told))
        self._reasoning += [split.reasoning] if split.reasoning else []
        return split

    @property
    def num_tokens(self) -> int:
        """Of the reasoning's text, without its markers."""
        text = "".join(self._reasoning)
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def shown_token_ids(tokenizer: Tokenizer, markers: Iterable[str]) -> tuple[int, ...]:
    """Ids of the markers that are special tokens, and would be left out of a text that parsers read."""
    found = {tokenizer.token_id(marker) for marker in markers}
    return tuple(sorted(token_id for token_id in found if token_id in tokenizer.special_token_ids))
