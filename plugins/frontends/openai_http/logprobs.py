"""Log-probabilities in the three shapes clients know: chat, completions, and vLLM's prompt logprobs (bugs E1-E4).

Numbers are finite: what is not becomes -9999.0, the value OpenAI documents for "very unlikely".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from core.batch import TokenLogprobs
from core.model.tokenizer import Tokenizer

LEAST = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": finite(logprob), "bytes": list(data)}


def chat_logprobs(tokenizer: Tokenizer, rows: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`bytes` are the token's raw bytes; joined over tokens they are the text, also where `token` shows U+FFFD."""
    content = [
        {
            **_chat_token(tokenizer, row.token_id, row.logprob),
            "top_logprobs": [_chat_token(tokenizer, *alternative) for alternative in row.top[:num_top]],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or `bytes:\\x..` where its bytes are no text, so that alternatives stay distinct keys."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """One choice's logprobs in the completions shape. `text_offset` counts characters from the start of `text`."""

    def __init__(self, tokenizer: Tokenizer, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """Echoed tokens; the first has no logprob (null), since nothing predicts it."""
        parts = self._new()
        known: list[TokenLogprobs | None] = [None, *(rows or ())]
        known += [None] * (len(token_ids) - len(known))
        for token_id, row in zip(token_ids, known, strict=False):
            self._add(parts, token_id, row)
        return parts

    def tokens(self, rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
        parts = self._new()
        for row in rows:
            self._add(parts, row.token_id, row)
        return parts

    def _new(self) -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, parts: dict[str, list[Any]], token_id: int, row: TokenLogprobs | None) -> None:
        parts["tokens"].append(completion_token(self._tokenizer, token_id))
        parts["token_logprobs"].append(None if row is None else finite(row.logprob))
        parts["top_logprobs"].append(None if row is None else self._top(row))
        parts["text_offset"].append(self._offset)
        self._offset += len(self._tokenizer.token_text(token_id))

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        """The alternatives and the token itself; of equal texts the more probable one stays."""
        top: dict[str, float] = {}
        for token_id, logprob in [*row.top[: self._num_top], (row.token_id, row.logprob)]:
            top.setdefault(completion_token(self._tokenizer, token_id), finite(logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs], num_top: int) -> list[Any]:
    """vLLM's shape: null for the first position, then token id -> logprob, rank and text."""
    return [None, *(_prompt_row(tokenizer, row, num_top) for row in rows)]


def _prompt_row(tokenizer: Tokenizer, row: TokenLogprobs, num_top: int) -> dict[str, Any]:
    entries = {row.token_id: (row.logprob, row.rank)}
    for rank, (token_id, logprob) in enumerate(row.top[:num_top], start=1):
        entries.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in entries.items()
    }
