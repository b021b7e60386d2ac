"""What of a request would leave its grammar without a token: refused before it runs.

Stop strings and stop tokens are not: many clients send those of a model with every request. An answer that one of them cuts
says so by its `stop_reason`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from core.errors import RequestError
from core.request import SamplingParams

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer


def check_grammar_conflicts(params: SamplingParams, model: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raises RequestError that names the other field. `params.allowed_token_ids` are checked ids."""
    grammar = params.grammar
    if grammar is None:
        return
    if params.ignore_eos:
        raise _conflict("ignore_eos", "a text that a grammar describes ends with an end of sequence")
    allowed = params.allowed_token_ids
    if allowed is not None and model.eos_token_ids.isdisjoint(allowed):
        raise _conflict(
            "allowed_token_ids", "the text of a grammar ends with an end of sequence, and none is among them"
        )
    if grammar.kind == "choice" and grammar.source:
        _check_choices(params, json.loads(grammar.source))


def _check_choices(params: SamplingParams, texts: list[str]) -> None:
    """One of them must be left, and be long enough: a token has one byte at least."""
    if params.bad_words and {text.strip(" ") for text in texts} <= {word.strip(" ") for word in params.bad_words}:
        raise _conflict("bad_words", "they bar every text that there is to choose from")
    longest = max(len(text.encode("utf-8", "replace")) for text in texts)
    if params.min_tokens > longest:
        raise _conflict("min_tokens", f"no text to choose from has more than {longest} tokens")


def _conflict(param: str, reason: str) -> RequestError:
    return RequestError(f"{param} and a grammar: {reason}", param=param, code="conflict")
