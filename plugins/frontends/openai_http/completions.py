"""The shape of /v1/completions: `text_completion`, whole and in chunks; echo and its logprobs (bugs E3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.batch import TokenLogprobs
from core.model.tokenizer import Tokenizer
from core.outputs import CompletionOutput, Usage
from plugins.frontends.openai_http.answer import Choice, Collected, Head, finish_reason, stop_reason, usage_body
from plugins.frontends.openai_http.calls import Delta
from plugins.frontends.openai_http.logprobs import CompletionLogprobs, prompt_logprobs


@dataclass(slots=True)
class CompletionShape:
    """`answer.Shape` for completions. `echo` holds each prompt's text, and is empty where no echo was asked for.

    With `best_of` there are `n` choices for each prompt, and the `num_kept` most probable of them are told.
    """

    head: Head
    tokenizer: Tokenizer
    n: int = 1
    num_kept: int | None = None  # None: all
    num_top: int | None = None
    num_prompt_top: int | None = None
    include_usage: bool = False
    return_token_ids: bool = False
    echo: Sequence[str] = ()
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        for output in delta.output.outputs:
            index = delta.prompt * self.n + output.index
            if index not in self._started:
                self._started.add(index)
                yield from self._first_chunk(index, delta)
            told = output.text or output.logprobs or (self.return_token_ids and output.token_ids)
            if told or output.finish_reason is not None:
                yield self._chunk(index, output)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.head.body("text_completion"), "choices": [], "usage": usage_body(usage)}

    def collected(self) -> Collected:
        return Collected(self.n)

    def whole(self, collected: Collected, usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index, choice, collected) for index, choice in self._kept(collected)]
        return {**self.head.body("text_completion"), "choices": choices, "usage": usage_body(usage)}

    def _kept(self, collected: Collected) -> Iterable[tuple[int, Choice]]:
        if self.num_kept is None or self.num_kept >= self.n:
            return collected.in_order()
        return enumerate(collected.best(self.num_kept))

    def _first_chunk(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """The echo and the prompt's ids come before a choice's own text; without either there is nothing to say."""
        if not self.echo and not self.return_token_ids:
            return
        text = self.echo[delta.prompt] if self.echo else ""
        output = delta.output
        choice = self._body(index, text, self._echoed(index, output.prompt_token_ids, output.prompt_logprobs))
        if self.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": []}
        yield self._object(choice)

    def _chunk(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        logprobs = self._of(index).tokens(output.logprobs) if self.num_top is not None and output.logprobs else None
        choice = self._body(index, output.text, logprobs, finish_reason(output), stop_reason(output))
        if self.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return self._object(choice)

    def _object(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self.head.body("text_completion"), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return body

    def _choice(self, index: int, choice: Choice, collected: Collected) -> dict[str, Any]:
        prompt_ids = collected.prompt_token_ids.get(choice.prompt, [])
        prompt_rows = collected.prompt_logprobs.get(choice.prompt)
        text = "".join(choice.text)
        logprobs = self._echoed(index, prompt_ids, prompt_rows)
        if self.num_top is not None:
            tokens = self._of(index).tokens(choice.logprobs)
            logprobs = tokens if logprobs is None else {key: logprobs[key] + tokens[key] for key in tokens}
        text = self.echo[choice.prompt] + text if self.echo else text
        body = self._body(index, text, logprobs, choice.finish_reason, choice.stop_reason)
        if self.num_prompt_top is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt_rows or (), self.num_prompt_top)
        if self.return_token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids}
        return body

    def _echoed(
        self, index: int, token_ids: Sequence[int], rows: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        return self._of(index).prompt(token_ids, rows) if self.echo and self.num_top is not None else None

    def _of(self, index: int) -> CompletionLogprobs:
        return self._logprobs.setdefault(index, CompletionLogprobs(self.tokenizer, self.num_top or 0))

    def _body(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish: str | None = None,
        stop: int | str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
