"""The shape of /v1/chat/completions: `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.model.tokenizer import Tokenizer
from core.outputs import CompletionOutput, Usage
from core.stages.reasoning_parser import SplitText
from plugins.frontends.openai_http.answer import Choice, Collected, Head, finish_reason, stop_reason, usage_body
from plugins.frontends.openai_http.calls import Delta
from plugins.frontends.openai_http.logprobs import chat_logprobs, prompt_logprobs
from plugins.frontends.openai_http.tools import CallsOfChoice
from plugins.frontends.reasoning import ReasoningOfChoice


@dataclass(slots=True)
class ChatShape:
    """`answer.Shape` for chat. `num_top` and `num_prompt_top` are None where no logprobs were asked for.

    `calls` has one entry per choice, and is empty for a request without tools; `reasoning` has one per choice.

    Reasoning has two names that say the same: `reasoning_content` (DeepSeek, SGLang, llama.cpp, LiteLLM) and `reasoning`
    (OpenRouter, and vLLM instead of the older name: vllm-project/vllm#27755).
    """

    head: Head
    tokenizer: Tokenizer
    n: int = 1
    num_top: int | None = None
    num_prompt_top: int | None = None
    include_usage: bool = False
    return_token_ids: bool = False
    calls: Sequence[CallsOfChoice] = ()
    reasoning: Sequence[ReasoningOfChoice] = ()
    _started: set[int] = field(default_factory=set)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        for output in delta.output.outputs:
            if output.index not in self._started:
                yield self._first_chunk(output.index, delta)
            words, reason = self._words(output, delta.output.prompt_token_ids)
            told = words or output.logprobs or (self.return_token_ids and output.token_ids)
            if told or reason is not None:
                yield self._chunk(output, words, reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.head.body("chat.completion.chunk"), "choices": [], "usage": self._usage(usage)}

    def collected(self) -> Collected:
        return Collected(self.n, self._split)

    def whole(self, collected: Collected, usage: Usage) -> dict[str, Any]:
        prompt_ids = collected.prompt_token_ids.get(0, [])
        choices = [self._choice(index, choice) for index, choice in collected.in_order()]
        body = {**self.head.body("chat.completion"), "choices": choices, "usage": self._usage(usage)}
        if self.num_prompt_top is not None:
            rows = collected.prompt_logprobs.get(0, ())
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, rows, self.num_prompt_top)
        if self.return_token_ids:
            body["prompt_token_ids"] = prompt_ids
        return body

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, sum(reasoning.num_tokens for reasoning in self.reasoning))

    def _first_chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """The role comes once per choice, before its text."""
        extra: dict[str, Any] = {}
        if self.return_token_ids and not self._started:
            extra["prompt_token_ids"] = delta.output.prompt_token_ids
        self._started.add(index)
        words = {"role": "assistant", "content": ""}
        return {**self._object({"index": index, "delta": words, "logprobs": None, "finish_reason": None}), **extra}

    def _words(self, output: CompletionOutput, prompt_ids: Sequence[int]) -> tuple[dict[str, Any], str | None]:
        """The delta, and why the choice has ended. Raises GenerationError where a parser fails."""
        reason = finish_reason(output)
        split = self._split(output, prompt_ids)
        words: dict[str, Any] = {**_named(split.reasoning), "content": split.content}
        if self.calls:
            calls = self.calls[output.index]
            said = calls.take(words["content"], ended=reason is not None)
            words |= {"content": said.content, "tool_calls": said.tool_calls}
            reason = calls.finish_reason(reason)
        return {key: value for key, value in words.items() if value}, reason

    def _split(self, output: CompletionOutput, prompt_ids: Sequence[int]) -> SplitText:
        if not self.reasoning:
            return SplitText(content=output.text)
        return self.reasoning[output.index].take(output, prompt_ids)

    def _chunk(self, output: CompletionOutput, words: dict[str, Any], reason: str | None) -> dict[str, Any]:
        wanted = self.num_top is not None and output.logprobs
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": words,
            "logprobs": chat_logprobs(self.tokenizer, output.logprobs, self.num_top or 0) if wanted else None,
            "finish_reason": reason,
            "stop_reason": stop_reason(output),
        }
        if self.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return self._object(choice)

    def _object(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self.head.body("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        wanted = self.num_top is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        reason = choice.finish_reason
        reasoning = "".join(choice.reasoning)
        message |= _named(reasoning) if reasoning else {}
        if self.calls:
            calls = self.calls[index]
            message |= calls.whole(message["content"])
            reason = calls.finish_reason(reason)
        body: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, choice.logprobs, self.num_top or 0) if wanted else None,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body


def _named(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning, "reasoning": reasoning}
