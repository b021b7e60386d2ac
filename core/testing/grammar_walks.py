"""Ways through the masks of a grammar, and to write a text in tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.stages.grammar import CompiledGrammar, Matcher, Vocabulary, mask_size
from core.testing.grammar_examples import GrammarExample

MAX_TRIES = 2000  # tokens tried to write one text through masks


@dataclass(frozen=True, slots=True)
class Case:
    """One grammar over one vocabulary."""

    example: GrammarExample
    vocabulary: Vocabulary
    artifact: bytes
    grammar: CompiledGrammar

    @property
    def name(self) -> str:
        return f"{self.example.spec.kind} {self.example.spec.source[:80]!r}"

    def text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.vocabulary.tokens[token_id] for token_id in token_ids)

    def show(self, token_ids: Sequence[int]) -> str:
        return f"{self.text([i for i in token_ids if i < len(self.vocabulary.tokens)])!r} (ids {list(token_ids)})"


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> frozenset[int]:
    """The ids of a mask, which is written over what was there."""
    found = []
    for garbage in (0, -1):
        mask = np.full(mask_size(vocabulary.vocab_size), garbage, np.int32)
        matcher.fill(mask)
        found.append(frozenset(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()))
    assert found[0] == found[1], "a part of the mask is not written"
    return found[0]


def followed(case: Case, ids: Sequence[int]) -> list[frozenset[int]]:
    """The masks along a path, its start included."""
    matcher = case.grammar.matcher()
    masks = [allowed(matcher, case.vocabulary)]
    for token_id in ids:
        matcher.accept([token_id])
        masks.append(allowed(matcher, case.vocabulary))
    return masks


def led(case: Case, text: bytes) -> bool:
    """Whether masks allow the tokens of some way to write `text`, and its end."""
    matcher, tokens, tries = case.grammar.matcher(), case.vocabulary.tokens, 0
    ways, taken = [_begin(case, matcher, text)], [b""]
    while ways and tries < MAX_TRIES:
        if not ways[-1]:
            ways.pop()
            taken.pop()
            if taken:
                matcher.rollback(1)
            continue
        token_id, tries = ways[-1].pop(), tries + 1
        assert matcher.accept([token_id]) == 1, f"{case.name}: {token_id} is allowed and does not fit"
        if token_id in case.vocabulary.eos_ids:
            return True
        taken.append(taken[-1] + tokens[token_id])
        ways.append(_begin(case, matcher, text[len(taken[-1]) :]))
    return False


def _begin(case: Case, matcher: Matcher, rest: bytes) -> list[int]:
    """Allowed ids with which `rest` begins, the longest last."""
    may, vocabulary = allowed(matcher, case.vocabulary), case.vocabulary
    if not rest:
        return sorted(may & vocabulary.eos_ids)
    fitting = [i for i in may - vocabulary.eos_ids if rest.startswith(vocabulary.tokens[i])]
    return sorted(fitting, key=lambda i: len(vocabulary.tokens[i]))


def walked(case: Case, rng: random.Random, most: int = 30) -> list[int] | None:
    """Ids drawn from masks up to an end; None where none came."""
    matcher, ids = case.grammar.matcher(), list[int]()
    for _ in range(most):
        may = allowed(matcher, case.vocabulary)
        assert may, f"{case.name}: nothing is allowed after {case.show(ids)}"
        if may & case.vocabulary.eos_ids and (rng.random() < 0.4 or may == case.vocabulary.eos_ids):
            return ids
        token_id = rng.choice(sorted(may - case.vocabulary.eos_ids))
        assert matcher.accept([token_id]) == 1, (
            f"{case.name}: after {case.show(ids)} {token_id} is allowed, and does not fit"
        )
        ids.append(token_id)
    return None


def segmented(vocabulary: Vocabulary, text: str, rng: random.Random) -> list[int]:
    """The ids of a way to write `text` in tokens, most of them short."""
    data, ids, at = text.encode(), list[int](), 0
    plain = [i for i in range(len(vocabulary.tokens)) if vocabulary.tokens[i] and i not in vocabulary.special_ids]
    while at < len(data):
        fitting = [i for i in plain if data.startswith(vocabulary.tokens[i], at)]
        ids.append(rng.choice(fitting))
        at += len(vocabulary.tokens[ids[-1]])
    return ids
