"""The tokens of texts that stand in a grammar."""

from __future__ import annotations

import pytest

from core.grammar.text_tokens import TextEncoder
from core.testing.grammar_examples import vocabularies

TEXTS = [
    "",
    "hello world",
    " hello",
    "yes",
    "<s>",
    "a<|im_end|>b</s>",
    "漢字 🔥",
    "\n\n",
    "é\u0000",
    "<s",
    "<|im_start|><|im_start|>",
]


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_spell_the_text_and_none_is_special(vocabulary, text):
    ids = vocabulary.encode(text)
    assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == text.encode()
    assert vocabulary.special_ids.isdisjoint(ids)


def test_the_model_s_own_tokens_where_they_spell_the_text():
    calls = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return {"ab": [3], "\n": [0], "\nx": [0, 4], "x": [5]}.get(text, [9])

    tokens = [b"\n", b"a", b"b", b"ab", b"x", b" x"]
    encoder = TextEncoder(tokens, (), encode)
    assert encoder("ab") == [3], "as it is"
    assert encoder("x") == [4], "without the space that stands before the first text"
    assert encoder("abb") == [3, 2], "what the tokenizer gives is another text, or no token: the longest first"
    assert encoder("bq") == [2], "and no further than there are tokens"
