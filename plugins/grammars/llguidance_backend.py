"""Grammars by llguidance: a lexer of derivatives of regular expressions under an Earley parser, both lazy, so nothing is
precomputed: compiling is parsing, and a mask is a walk over the tokens with the parser (project: guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import llguidance

from core.request import GrammarSpec
from core.stages.grammar import GrammarContext, GrammarError, Mask, Vocabulary
from plugins.grammars.llguidance_text import grammar_text
from plugins.grammars.settings import LLGuidanceSettings


class LLGuidance:
    """The artifact is the grammar in llguidance's own notation: to parse it again takes less than a millisecond for most."""

    Settings = LLGuidanceSettings

    def __init__(self, settings: LLGuidanceSettings, context: GrammarContext):
        self._settings = settings
        self._load_vocabulary = context.load_vocabulary
        self._lock = Lock()
        self._made: Tokens | None = None

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            grammar = grammar_text(spec, self._settings.max_whitespace, self._tokens().vocabulary)
        except RecursionError as error:
            raise GrammarError("it has too many levels") from error
        self._parsed(grammar).check_start()
        return grammar.encode()

    def load(self, artifact: bytes) -> Grammar:
        return self._parsed(artifact.decode())

    def _parsed(self, grammar: str) -> Grammar:
        tokens = self._tokens()
        return Grammar(tokens, _alive(llguidance.LLMatcher(tokens.native, grammar, log_level=0, limits=self._limits())))

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

    def _tokens(self) -> Tokens:
        """Two threads may load at once."""
        with self._lock:
            if self._made is None:
                self._made = Tokens(self._load_vocabulary())
            return self._made


class Tokens:
    """The vocabulary, and what llguidance makes of it once."""

    def __init__(self, vocabulary: Vocabulary):
        if not vocabulary.eos_ids:
            raise GrammarError("the model has no id that ends a sequence, so nothing can end with its grammar")
        self.vocabulary = vocabulary
        self.end = (min(vocabulary.eos_ids),)

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

    def __init__(self, tokens: Tokens, root: llguidance.LLMatcher):
        self._tokens = tokens
        self._root = root  # never moved

    def matcher(self) -> LLMatcher:
        return LLMatcher(self._tokens, self._root.deep_copy())

    def check_start(self) -> None:
        """Raises GrammarError where no text is in the language."""
        if self._root.is_stopped() and not self._root.is_accepting():
            raise GrammarError("no text satisfies it")
        probe = self._root.deep_copy()
        probe.compute_bitmask()
        _alive(probe)


class LLMatcher:
    """See `core.stages.grammar.Matcher`. The end of the sequence is counted here: to llguidance it is no token."""

    def __init__(self, tokens: Tokens, native: llguidance.LLMatcher):
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
    return " ".join(message.replace("<non-verbose/>", "").split())[:400] or "llguidance cannot go on"
