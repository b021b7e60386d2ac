"""The tokens of a model as grammars need them. Imports no torch."""

from __future__ import annotations

from functools import partial

from core.grammar.text_tokens import TextEncoder
from core.model.spec import ModelSpec
from core.model.tokenizer import Tokenizer
from core.stages.grammar import Vocabulary


def read_vocabulary(model: ModelSpec, tokenizer: Tokenizer) -> Vocabulary:
    """Takes the time of looking at each token once."""
    special = tokenizer.special_token_ids | tokenizer.unusable_token_ids | model.eos_token_ids
    hidden = model.unusable_token_ids
    size = min(tokenizer.vocab_size, model.vocab_size)
    tokens = [b"" if token_id in hidden else tokenizer.token_bytes(token_id) for token_id in range(size)]
    special_ids = frozenset(token_id for token_id in special if token_id < size)
    return Vocabulary(
        tokens=tokens,
        vocab_size=model.vocab_size,
        special_ids=special_ids,
        eos_ids=model.eos_token_ids,
        encode=TextEncoder(tokens, special_ids, partial(tokenizer.encode, add_special_tokens=False)),
    )
