"""What comes before a grammar in an output: free text up to a marker, such as reasoning up to `</think>`.

The marker may be one token or several, and a token may reach beyond it: so bytes are looked at, not ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from core.request import GrammarSpec
from core.stages.grammar import Mask, Matcher, Vocabulary

WHITE_SPACE = b" \t\n\r"
_WHITE = frozenset(bytes([byte]) for byte in WHITE_SPACE)
MAX_GAP = 2
"""Tokens of white space between the marker and the grammar's text: models have learnt to write a blank line there."""
MAX_GAP_BYTES = 8  # of one of these


class Stage(Enum):
    """Where in an output a matcher stands."""

    START = "start"  # nothing is there yet; only where the free text has an opening
    OPENING = "opening"
    FREE = "free"
    GAP = "gap"  # behind the marker
    INNER = "inner"  # in the grammar
    ENDED = "ended"  # without the marker


@dataclass(frozen=True, slots=True)
class At:
    """`count`: bytes of the opening or of the marker that are there; tokens of a gap."""

    stage: Stage
    count: int = 0
    is_both: bool = False  # the text may still be the grammar's, too: of an opening

    @property
    def may_be_inner(self) -> bool:
        return self.stage is Stage.START or self.is_both


class Prelude:
    """The free text of one `GrammarSpec.after`. What it knows of the vocabulary is found once, for all requests."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._marker = spec.after.encode()
        self._opening = spec.opening.encode()
        self._may_end = spec.may_end
        self._shorter = _borders(self._marker)
        self._most_gaps = (
            0 if spec.may_end else MAX_GAP
        )  # text that may end is followed by a call, which begins at once
        self.start = At(Stage.START if spec.opening else Stage.FREE)
        self._ends = np.array(sorted(vocabulary.eos_ids), np.int64)
        self._found: dict[At, NDArray[np.int64]] = {}

    def opened(self, at: At, token_id: int) -> At | None:
        """Where in an opening, or behind it, the token leads. None: it does not go on with one."""
        data, rest = self._bytes(token_id), self._opening[at.count :]
        if token_id in self._vocabulary.eos_ids or not data:
            return None
        if len(data) < len(rest):
            return At(Stage.OPENING, at.count + len(data)) if rest.startswith(data) else None
        return self._in_free(0, data[len(rest) :]) if data.startswith(rest) else None

    def moved(self, at: At, token_id: int) -> At | None:
        """Where the token leads from free text on. None: it does not fit; INNER: it is for the grammar to say."""
        if at.stage is Stage.FREE:
            if token_id in self._vocabulary.eos_ids:
                return At(Stage.ENDED) if self._may_end else None
            return self._in_free(at.count, self._bytes(token_id))
        if at.stage is Stage.ENDED:
            return None
        is_gap = at.stage is Stage.GAP and at.count < self._most_gaps and _is_gap(self._bytes(token_id))
        return replace(at, count=at.count + 1) if is_gap else At(Stage.INNER)

    def fill(self, at: At, mask: Mask, inner: Matcher) -> None:
        """See `core.stages.grammar.Matcher.fill`."""
        if at.stage is Stage.FREE:
            mask.fill(-1)
            _bar(mask, self._special(at))
            if not self._may_end:
                _bar(mask, self._ends)
            return
        if at.stage is Stage.ENDED or (at.stage is Stage.OPENING and not at.is_both):
            mask.fill(0)
        else:
            inner.fill(mask)
        _add(mask, self._special(at))

    def is_inner(self, at: At) -> bool:
        """Whether the grammar alone says what may come."""
        return at.stage is Stage.INNER or (at.stage is Stage.GAP and at.count >= self._most_gaps)

    def _bytes(self, token_id: int) -> bytes:
        tokens = self._vocabulary.tokens
        return tokens[token_id] if 0 <= token_id < len(tokens) else b""

    def _in_free(self, count: int, data: bytes) -> At | None:
        """None: there is more than white space behind the marker, which the grammar would not see."""
        for index, byte in enumerate(data):
            while count and self._marker[count] != byte:
                count = self._shorter[count - 1]
            count += self._marker[count] == byte
            if count == len(self._marker):
                behind = data[index + 1 :]
                if not behind:
                    return At(Stage.GAP)
                return At(Stage.GAP, 1) if self._most_gaps and _is_gap(behind) else None
        return At(Stage.FREE, count)

    def _special(self, at: At) -> NDArray[np.int64]:
        """Ids that do not fit into free text here; elsewhere, those that do without the grammar."""
        if at not in self._found:
            self._found[at] = np.array(
                [i for i in self._special_ids(at) if i not in self._vocabulary.eos_ids], np.int64
            )
        return self._found[at]

    def _special_ids(self, at: At) -> Iterable[int]:
        """Few tokens have the byte that matters, and only these are looked at closely."""
        tokens = self._vocabulary.tokens
        if at.stage is Stage.FREE:
            last = self._marker[-1]
            return (i for i, data in enumerate(tokens) if last in data and self._in_free(at.count, data) is None)
        if at.stage in (Stage.START, Stage.OPENING):
            first = self._opening[at.count : at.count + 1]
            return (i for i, data in enumerate(tokens) if data[:1] == first and self.opened(at, i) is not None)
        if at.stage is Stage.GAP and at.count < self._most_gaps:
            return (i for i, data in enumerate(tokens) if data[:1] in _WHITE and _is_gap(data))
        return ()


class BehindText:
    """`core.stages.grammar.Matcher` of an output whose grammar begins behind free text."""

    def __init__(self, prelude: Prelude, inner: Matcher):
        self._prelude = prelude
        self._inner = inner
        self._num_inner = 0  # ids that it has taken
        self._ids: list[int] = []
        self._path: list[At] = []  # behind each of them

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            at = self._at
            moved = self._opened(at, token_id) if at.may_be_inner else self._moved(at, token_id)
            if moved is None:
                return count
            if moved.stage is Stage.INNER and not at.may_be_inner:
                taken = self._inner.accept(token_ids[count:])
                self._num_inner += taken
                self._ids += token_ids[count : count + taken]
                self._path += [moved] * taken
                return count + taken
            self._ids.append(token_id)
            self._path.append(moved)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        kept = len(self._path) - num_tokens
        num_inner = sum(at.stage is Stage.INNER for at in self._path[kept:])
        ids, self._ids = self._ids[:kept], self._ids[:kept]
        del self._path[kept:]
        if self._at.may_be_inner:  # few ids, and the grammar may have taken them, or not
            self._take_back(self._num_inner)
            self._ids, self._path = [], []
            self.accept(ids)
        else:
            self._take_back(num_inner)

    def fill(self, mask: Mask) -> None:
        if self._prelude.is_inner(self._at):
            self._inner.fill(mask)
        else:
            self._prelude.fill(self._at, mask, self._inner)

    def forced(self) -> tuple[int, ...]:
        return self._inner.forced() if self._prelude.is_inner(self._at) else ()

    @property
    def _at(self) -> At:
        return self._path[-1] if self._path else self._prelude.start

    def _moved(self, at: At, token_id: int) -> At | None:
        if at.stage is Stage.OPENING:
            return self._prelude.opened(at, token_id)
        return self._prelude.moved(at, token_id)

    def _opened(self, at: At, token_id: int) -> At | None:
        """The grammar goes along until the opening is whole, or one of the two does not go on."""
        opened, taken = self._prelude.opened(at, token_id), self._inner.accept([token_id])
        self._num_inner += taken
        if opened is None:
            return At(Stage.INNER) if taken else None
        if opened.stage is Stage.OPENING and taken:
            return replace(opened, is_both=True)
        self._take_back(self._num_inner)
        return opened

    def _take_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._inner.rollback(num_tokens)
            self._num_inner -= num_tokens


def _borders(marker: bytes) -> list[int]:
    """At i: bytes of the longest proper end of marker[:i + 1] that is also its beginning (Knuth, Morris, Pratt)."""
    found = [0] * len(marker)
    for index in range(1, len(marker)):
        count = found[index - 1]
        while count and marker[count] != marker[index]:
            count = found[count - 1]
        found[index] = count + (marker[count] == marker[index])
    return found


def _is_gap(data: bytes) -> bool:
    return 0 < len(data) <= MAX_GAP_BYTES and not data.strip(WHITE_SPACE)


def _bar(mask: Mask, token_ids: NDArray[np.int64]) -> None:
    bits = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    np.bitwise_and.at(mask.view(np.uint32), token_ids // 32, ~bits)


def _add(mask: Mask, token_ids: NDArray[np.int64]) -> None:
    bits = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    np.bitwise_or.at(mask.view(np.uint32), token_ids // 32, bits)
