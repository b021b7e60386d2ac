"""Grammars by llguidance: a lexer of derivatives of regular expressions under an Earley parser, both lazy, so nothing is
precomputed: compiling is parsing, and a mask is a walk over the tokens with the parser (project: guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import llguidance

from core.request import GrammarSpec
from core.stages.grammar import GrammarContext, GrammarError, Mask, Vocabulary
from plugins.grammars.llguidance_text import grammar_text
from plugins.grammars.settings import LLGuidanceSettings
from plugins.grammars.tokens import Once, Tokens, one_line


class LLGuidance:
    """The artifact is the grammar in llguidance's own notation: to parse it again takes less than a millisecond for most."""

    Settings = LLGuidanceSettings

    def __init__(self, settings: LLGuidanceSettings, context: GrammarContext):
        self._settings = settings
        self._tokens = Once(lambda: LLTokens(context.load_vocabulary()))

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            return grammar_text(spec, self._settings.max_whitespace, self._tokens().vocabulary).encode()
        except RecursionError as error:
            raise GrammarError("it has too many levels") from error

    def load(self, artifact: bytes) -> Grammar:
        tokens, limits = self._tokens(), self._limits()
        return Grammar(
            tokens, _alive(llguidance.LLMatcher(tokens.native, artifact.decode(), log_level=0, limits=limits))
        )

    def _limits(self) -> llguidance.LLParserLimits:
        settings = self._settings
        return llguidance.LLParserLimits(
            max_items_in_row=settings.max_items_in_row,
            initial_lexer_fuel=settings.initial_lexer_fuel,
            step_lexer_fuel=settings.step_lexer_fuel,
            step_max_items=settings.step_max_items,
            max_lexer_states=settings.max_lexer_states,
            max_grammar_size=settings.max_grammar_size,
            verbose_errors=False,
        )


class LLTokens(Tokens):
    @cached_property
    def native(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(_Wrapper(self.vocabulary), eos_token=sorted(self.vocabulary.eos_ids))


class _Wrapper(llguidance.TokenizerWrapper):
    """A tokenizer as llguidance takes it. It may be called from any thread, and must not raise: that would be printed."""

    def __init__(self, vocabulary: Vocabulary):
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        padding = vocabulary.vocab_size - len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, *([b""] * padding)]
        self.eos_token_id = min(vocabulary.eos_ids)
        self.special_token_ids = sorted(vocabulary.special_ids | vocabulary.eos_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Grammar:
    """See `core.stages.grammar.CompiledGrammar`."""

    def __init__(self, tokens: LLTokens, root: llguidance.LLMatcher):
        self._tokens = tokens
        self._root = root  # never moved

    def matcher(self) -> LLMatcher:
        return LLMatcher(self._tokens, self._root.deep_copy())


class LLMatcher:
    """See `core.stages.grammar.Matcher`. The end of the sequence is counted here: to llguidance it is no token."""

    def __init__(self, tokens: LLTokens, native: llguidance.LLMatcher):
        self._eos_ids = tokens.vocabulary.eos_ids
        self._end = tokens.end
        self._num_ids = tokens.vocabulary.vocab_size
        self._native = native
        self._ended = False

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._ended:
            return 0
        num_text = next((at for at, token_id in enumerate(token_ids) if self._is_no_text(token_id)), len(token_ids))
        count = self._native.try_consume_tokens(list(token_ids[:num_text])) if num_text else 0
        _alive(self._native)
        if count < num_text or num_text == len(token_ids):
            return count
        if token_ids[num_text] in self._eos_ids and self._native.is_accepting():
            self._ended = True
            return count + 1
        return count

    def rollback(self, num_tokens: int) -> None:
        if self._ended and num_tokens:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._native.rollback(num_tokens)
            _alive(self._native)

    def fill(self, mask: Mask) -> None:
        if self._ended:
            mask[:] = 0
            return
        self._native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _alive(self._native)

    def forced(self) -> tuple[int, ...]:
        if self._ended:
            return ()
        if self._native.is_stopped():
            _alive(self._native)
            return self._end
        return tuple(self._native.compute_ff_tokens())

    def _is_no_text(self, token_id: int) -> bool:
        return token_id in self._eos_ids or not 0 <= token_id < self._num_ids


def _alive(native: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """Raises GrammarError with what stopped it: its limits, or a dead end."""
    if native.is_error():
        raise GrammarError(_in_one_line(native.get_error()))
    return native


def _in_one_line(message: str) -> str:
    if "NoExtensionBias" in message:
        return "there is nothing that may come next"
    return one_line(message.replace("<non-verbose/>", ""), "llguidance cannot go on")
