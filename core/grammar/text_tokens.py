"""The tokens of a text that stands in a grammar: behind other text, and its control tokens as plain characters. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

_BEFORE = "\n"
"""Stands before a text that must not be encoded as if it were the first: some tokenizers put a space there."""


class TextEncoder:
    """Callable with a text. The bytes of the ids are the text's, as far as there are tokens for them, and no id is special.

    So what tokenizers do to a text as a whole is undone: a space before it, control tokens that are spelled out in it, and
    what they normalise.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int], encode: Callable[[str], list[int]]):
        self._tokens = tokens
        self._special_ids = frozenset(special_ids)
        self._encode = encode
        self._spelled = _spellings(tokens[token_id] for token_id in self._special_ids if token_id < len(tokens))
        self._ids: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: str) -> list[int]:
        """`text` must be encodable as UTF-8."""
        ids: list[int] = []
        for part in self._parts(text):
            ids += self._part(part)
        return ids

    def _parts(self, text: str) -> list[str]:
        """Cut within each control token that is spelled out."""
        if self._spelled is None:
            return [text]
        cuts = [match.start() + 1 for match in self._spelled.finditer(text)]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _part(self, text: str) -> list[int]:
        data, ids = text.encode(), self._encode(text)
        if self._spells(ids, data):
            return ids
        before, ids = self._encode(_BEFORE), self._encode(_BEFORE + text)
        if ids[: len(before)] == before and self._spells(ids[len(before) :], data):
            return ids[len(before) :]
        return self._longest_first(data)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        if not self._special_ids.isdisjoint(ids) or any(token_id >= len(self._tokens) for token_id in ids):
            return False
        return b"".join(self._tokens[token_id] for token_id in ids) == data

    def _longest_first(self, data: bytes) -> list[int]:
        if not self._ids:
            plain = ((token, at) for at, token in enumerate(self._tokens) if at not in self._special_ids)
            self._ids = {token: at for token, at in plain if token}
            self._longest = max(map(len, self._ids), default=0)
        found, at = list[int](), 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return found  # nothing spells what is left
            found.append(self._ids[data[at:end]])
            at = end
        return found


def _spellings(tokens: Iterable[bytes]) -> re.Pattern[str] | None:
    texts = {token.decode("utf-8", "replace") for token in tokens if len(token) > 1}
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
