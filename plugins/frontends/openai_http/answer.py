"""What chat and completions have in common on the way out: choices, finish reasons, usage, and the `Shape` of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Protocol

from core.batch import TokenLogprobs
from core.outputs import CompletionOutput, Usage
from core.request import FinishReason
from core.stages.reasoning_parser import SplitText
from plugins.frontends.openai_http.calls import Delta

# OpenAI's words; `stop_reason` tells the rest apart.
FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",
    FinishReason.ABORT: "stop",
}
Split = Callable[[CompletionOutput, Sequence[int]], SplitText]
"""The next text of a choice; the ids are the prompt's."""
_TOLD_APART = (FinishReason.REPETITION, FinishReason.ABORT)


def finish_reason(output: CompletionOutput) -> str | None:
    return None if output.finish_reason is None else FINISH_REASONS[output.finish_reason]


def stop_reason(output: CompletionOutput) -> int | str | None:
    """The stop string or token id that matched; `repetition` or `abort` for those ends."""
    if output.finish_reason in _TOLD_APART:
        return str(output.finish_reason)
    return output.stop_reason


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    details = {"completion_tokens_details": {"reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **(details if reasoning_tokens else {}),
    }


@dataclass(slots=True)
class Choice:
    """One finished or growing answer: the concatenation of its deltas."""

    prompt: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: CompletionOutput, split: SplitText) -> None:
        self.text.append(split.content)
        self.reasoning.append(split.reasoning)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = finish_reason(output)
        self.stop_reason = stop_reason(output)

    @property
    def mean_logprob(self) -> float:
        """By which choices of different lengths are compared."""
        return sum(row.logprob for row in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class Collected:
    """A whole answer. Choice index: prompt index * n + index within the prompt."""

    n: int
    split: Split | None = None  # None: all text is content
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_token_ids: dict[int, list[int]] = field(default_factory=dict)  # by prompt index
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Raises GenerationError where a parser fails."""
        output = delta.output
        if output.prompt_token_ids:
            self.prompt_token_ids.setdefault(delta.prompt, output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs.setdefault(delta.prompt, output.prompt_logprobs)
        for part in output.outputs:
            choice = self.choices.setdefault(delta.prompt * self.n + part.index, Choice(delta.prompt))
            split = SplitText(content=part.text) if self.split is None else self.split(part, output.prompt_token_ids)
            choice.add(part, split)

    def in_order(self) -> Iterator[tuple[int, Choice]]:
        for index in sorted(self.choices):
            yield index, self.choices[index]

    def best(self, count: int) -> Iterator[Choice]:
        """The `count` most probable choices of each prompt, the best first."""
        ranked = sorted(self.in_order(), key=lambda item: (item[1].prompt, -item[1].mean_logprob, item[0]))
        for _, choices in groupby(ranked, key=lambda item: item[1].prompt):
            for _, choice in islice(choices, count):
                yield choice


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class Shape(Protocol):
    """How one endpoint writes an answer."""

    head: Head
    n: int

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """The stream objects for one delta; may be none."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last stream object: no choices."""
        ...

    def collected(self) -> Collected:
        """Of no delta, for `whole`."""
        ...

    def whole(self, collected: Collected, usage: Usage) -> dict[str, Any]: ...
