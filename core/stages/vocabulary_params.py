"""Sampling parameters that only the vocabulary can judge: token ids in range, bad words as token ids."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from core.errors import RequestError
from core.request import SamplingParams
from core.stages.grammar_conflicts import check_grammar_conflicts

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer

_MAX_BIAS = 100.0
# Text before a word, so that a tokenizer which marks the start of a text with a space does not do it to the word.
_ANCHOR = "\n"
_MAX_HALVED = 32  # characters; a longer word is never written with two tokens


def check_token_ids(ids: Iterable[object], vocab_size: int, param: str) -> None:
    """Raises RequestError unless every id is an integer (no bool, no float) in [0, vocab_size)."""
    for token_id in ids:
        if type(token_id) is not int:
            raise RequestError(f"{param}: token ids must be integers", param=param, code="invalid_type")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: a token id is outside the vocabulary; ids go from 0 to {vocab_size - 1}",
                param=param,
                code="token_id_out_of_range",
            )


def check_text(text: str, param: str) -> None:
    """Raises RequestError for a lone surrogate: JSON can carry it, UTF-8 and the tokenizer cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{param}: text has a lone surrogate", param=param, code="invalid_unicode") from None


def prepare_params(params: SamplingParams, model: ModelSpec, tokenizer: Tokenizer) -> SamplingParams:
    """Ids checked, unusable allowed ids removed, bad words resolved. Raises RequestError naming the parameter."""
    check_token_ids(params.stop_token_ids, model.vocab_size, "stop_token_ids")
    _check_logit_bias(params.logit_bias, model.vocab_size)
    for stop in params.stop:
        check_text(stop, "stop")
        if not stop:
            raise RequestError("stop: a stop string cannot be empty", param="stop", code="empty")
    allowed = _usable(params.allowed_token_ids, model, tokenizer)
    bad_words = tuple(ids for word in params.bad_words for ids in bad_word_token_ids(word, tokenizer))
    _check_something_is_left(allowed, bad_words, params, model)
    check_grammar_conflicts(params, model, tokenizer)
    return msgspec.structs.replace(
        params,
        allowed_token_ids=allowed,
        bad_words_token_ids=bad_words,
    )


def _check_something_is_left(
    allowed: tuple[int, ...] | None, bad_words: tuple[tuple[int, ...], ...], params: SamplingParams, model: ModelSpec
) -> None:
    """Masks that together bar every token would end the request with an error at its first step."""
    barred = {ids[0] for ids in bad_words if len(ids) == 1}
    if params.min_tokens > 0:
        barred |= {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    if allowed is not None:
        banned = {token_id for token_id, value in params.logit_bias.items() if value <= -_MAX_BIAS}
        if (barred | banned).issuperset(allowed):
            raise RequestError(
                "allowed_token_ids: bad_words, min_tokens and logit_bias bar every one of them, so nothing could be sampled",
                param="allowed_token_ids",
                code="empty",
            )
    elif len(barred | model.unusable_token_ids) >= model.vocab_size:
        raise RequestError(
            "stop_token_ids: with min_tokens and bad_words they bar the whole vocabulary, so nothing could be sampled",
            param="stop_token_ids",
            code="empty",
        )


def _check_logit_bias(bias: dict[int, float], vocab_size: int) -> None:
    check_token_ids(bias, vocab_size, "logit_bias")
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError("logit_bias: a bias must be a finite number", param="logit_bias", code="invalid_value")
        if abs(value) > _MAX_BIAS:
            raise RequestError(
                f"logit_bias: a bias must be between {-_MAX_BIAS:g} and {_MAX_BIAS:g}",
                param="logit_bias",
                code="invalid_value",
            )


def _usable(allowed: Sequence[int] | None, model: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    if allowed is None:
        return None
    check_token_ids(allowed, model.vocab_size, "allowed_token_ids")
    barred = model.unusable_token_ids | tokenizer.unusable_token_ids
    usable = tuple(token_id for token_id in allowed if token_id not in barred and token_id < tokenizer.vocab_size)
    if not usable:
        raise RequestError(
            "allowed_token_ids: none of the ids has a token that can be sampled",
            param="allowed_token_ids",
            code="empty",
        )
    return usable


def bad_word_token_ids(word: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of the ways a word is written within a text: with and without a space before it.

    As the tokenizer writes it, and in any two tokens: barred from " described", a model says " describe" and then "d".
    Raises RequestError for a word without a visible character.
    """
    check_text(word, "bad_words")
    bare = word.lstrip(" ")
    if not any(_is_visible(char) for char in bare):
        raise RequestError("bad_words: a word needs a visible character", param="bad_words", code="empty")
    forms: dict[tuple[int, ...], None] = {}
    for text in (bare, " " + bare):
        for ids in (tokenizer.encode(text, add_special_tokens=False), _anchored(text, tokenizer)):
            written = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
            if written.decode("utf-8", "replace") in (bare, " " + bare):
                forms[tuple(ids)] = None
        forms |= dict.fromkeys(_halved(text, tokenizer))
    if not forms:
        raise RequestError("bad_words: the vocabulary cannot write this word", param="bad_words", code="invalid_value")
    return tuple(forms)


def _halved(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Every pair of tokens that writes `text`."""
    if len(text) > _MAX_HALVED:
        return []
    cuts = range(1, len(text))
    pairs = [(_one_token(text[:cut], tokenizer), _one_token(text[cut:], tokenizer)) for cut in cuts]
    return [(left, right) for left, right in pairs if left is not None and right is not None]


def _one_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The token that is exactly `text`, if there is one."""
    for ids in (tokenizer.encode(text, add_special_tokens=False), _anchored(text, tokenizer)):
        if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == text.encode():
            return ids[0]
    return None


def _is_visible(char: str) -> bool:
    return not char.isspace() and unicodedata.category(char) not in ("Cc", "Cf")


def _anchored(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of `text` after a newline; [] where the newline and the text share a token."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    return ids[len(anchor) :] if anchor and ids[: len(anchor)] == anchor else []
