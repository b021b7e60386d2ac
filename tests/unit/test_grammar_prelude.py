"""Free text before a grammar: `GrammarSpec.after`, whatever tokens its markers come in."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from core.grammar.prelude import MAX_GAP, BehindText, Prelude
from core.request import GrammarSpec
from core.stages.grammar import Vocabulary, allow, mask_size
from core.testing.grammar_walks import allowed

THINK = {"after": "</think>", "opening": "<think>"}
PIECES = (
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "</",
    "think",
    ">\n\n",
    "</think>\n",
    "\n\n",
    ">a",
    "x</think>ab",
    " ",
    "ab",
    "abc",
)


def vocabulary(*left_out):
    tokens = [b"a", b"b", b"c", b"<", b"/", b">", b"t", b"h", b"i", b"n", b"k", b"s", b"\n", b"\xe6", b"\xbc\xa2", b""]
    tokens += [piece.encode() for piece in PIECES if piece not in left_out]
    ends = frozenset({len(tokens), len(tokens) + 1})
    return Vocabulary([*tokens, b"<eos>", b"<|end|>"], len(tokens) + 5, ends, ends, lambda text: [])


class Abc:
    """The language of the texts `ab`, `abc` and `<this>`, by bytes."""

    texts = (b"ab", b"abc", b"<this>")

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary
        self.ids = []

    @property
    def _text(self):
        return b"".join(self._vocabulary.tokens[one] for one in self.ids)

    def _next(self):
        if any(one in self._vocabulary.eos_ids for one in self.ids):
            return set()
        tokens = enumerate(self._vocabulary.tokens)
        found = {at for at, data in tokens if data and any(text.startswith(self._text + data) for text in self.texts)}
        found -= self._vocabulary.eos_ids
        return found | (self._vocabulary.eos_ids if self._text in self.texts else set())

    def accept(self, token_ids):
        for count, token_id in enumerate(token_ids):
            if token_id not in self._next():
                return count
            self.ids.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens):
        assert 0 < num_tokens <= len(self.ids)
        del self.ids[len(self.ids) - num_tokens :]

    def fill(self, mask):
        allow(mask, self._next())

    def forced(self):
        found = self._next()
        return tuple(found) if len(found) == 1 else ()


def behind(words, **spec):
    return BehindText(Prelude(GrammarSpec(kind="ebnf", **spec), words), Abc(words))


def bytes_of(ids, words):
    return b"".join(words.tokens[one] for one in ids if one not in words.eos_ids)


def in_language(data, *, after, opening="", may_end=False):
    """What `BehindText` holds an output to, said once more by a regular expression."""
    blank = rb"[ \t\n\r]*" if not may_end else b""
    text, end = rb"(ab|abc|<this>)", re.escape(after.encode())
    free = rb"(?:(?!" + end + rb").)*" + end + blank + text
    options = [re.escape(opening.encode()) + free] if opening else [free]
    if opening:
        options.append(text)
    if may_end:
        options.append(rb"(?:(?!" + end + rb").)*")
    return re.fullmatch(b"|".join(b"(?:" + one + b")" for one in options), data, re.DOTALL) is not None


SPECS = [
    THINK,
    {"after": "</think>"},
    {"after": "</think>", "may_end": True},
    {"after": "aab"},
    {"after": "<", "may_end": True},
]
WORDS = [vocabulary(), vocabulary("<think>", "</think>"), vocabulary(*PIECES)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("words", WORDS, ids=["one token", "several", "bytes"])
def test_walks_end_in_the_language_and_masks_are_what_fits(spec, words):
    rng, num_ended = random.Random(3), 0
    for _ in range(150):
        matcher, ids, marks = behind(words, **spec), [], iter(())
        while len(ids) < 40:
            options = allowed(matcher, words)
            in_words = {one for one in options if one < len(words.tokens) and words.tokens[one]}
            for token_id in range(len(words.tokens)):  # the slow twin of a mask
                if not words.tokens[token_id]:
                    continue
                taken = matcher.accept([token_id])
                assert taken == (token_id in in_words), (bytes_of(ids, words), words.tokens[token_id])
                if taken:
                    matcher.rollback(1)
            assert allowed(matcher, words) == options, "taking back what was tried changes nothing"
            assert options, f"a dead end after {bytes_of(ids, words)}"
            forced = matcher.forced()
            if forced:
                assert {forced[0]} == in_words
            ending = sorted(words.eos_ids & in_words)
            marker = next(marks, None) if not ending else None  # now and then its bytes in a row
            if marker is None and rng.random() < 0.3:
                marks = iter([words.tokens.index(bytes([byte])) for byte in spec["after"].encode()])
            token_id = marker if marker in in_words else rng.choice(sorted(ending or in_words))
            assert matcher.accept([token_id]) == 1
            ids.append(token_id)
            if token_id in words.eos_ids:
                num_ended += 1
                assert in_language(bytes_of(ids, words), **spec), bytes_of(ids, words)
                assert matcher.accept([token_id]) == 0
                break
            if rng.random() < 0.1:
                num_tokens = rng.randint(1, len(ids))
                matcher.rollback(num_tokens)
                del ids[len(ids) - num_tokens :]
    assert num_ended > 20


@pytest.mark.parametrize("words", WORDS, ids=["one token", "several", "bytes"])
def test_what_is_in_the_language_fits(words):
    rng = random.Random(5)
    texts = [
        "<think></think>ab",
        "<think>ahi\n</think>\n\nabc",
        "ab",
        "<this>",
        "<think><think></th</think> ab",
    ]
    for text in texts:
        for _ in range(20):
            ids, data = [], text.encode()
            while data:
                fits = [at for at, token in enumerate(words.tokens) if token and data.startswith(token)]
                if not fits:
                    break
                ids.append(rng.choice(fits))
                data = data[len(words.tokens[ids[-1]]) :]
            crosses = any(words.tokens[one] in (b">a", b"x</think>ab") for one in ids)
            gap = re.search(rb"</think>(\s*)ab", text.encode())
            if data or crosses or (gap and len(gap[1]) > MAX_GAP):
                continue
            matcher = behind(words, **THINK)
            assert matcher.accept([*ids, min(words.eos_ids)]) == len(ids) + 1, (text, [words.tokens[i] for i in ids])
            matcher.rollback(len(ids) + 1)
            assert matcher.accept(ids[:1]) == 1


def test_free_text_is_free_and_does_not_end():
    words = WORDS[0]
    matcher = behind(words, after="</think>")
    free = allowed(matcher, words)
    everything = set(range(words.vocab_size))
    assert everything - free == words.eos_ids | {words.tokens.index(b"x</think>ab")}
    assert allowed(behind(words, after="</think>", may_end=True), words) >= words.eos_ids
    assert matcher.forced() == ()


def test_a_long_text_costs_one_look_at_each_token():
    words = WORDS[0]
    matcher = behind(words, **THINK)
    ids = [words.tokens.index(b"<think>"), *[words.tokens.index(b"a")] * 5000]
    assert matcher.accept(ids) == len(ids)
    mask = np.zeros(mask_size(words.vocab_size), np.int32)
    for _ in range(3000):
        assert matcher.accept(ids[1:3]) == 2
        matcher.fill(mask)
        matcher.rollback(2)
