"""Grammars by xgrammar: a pushdown automaton whose masks are kept per state (project: mlc-ai/xgrammar; paper: Dong et al. 2024,
arXiv:2411.15100)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import ConfigError
from core.memory import num_bytes
from core.request import GrammarSpec
from core.stages.grammar import GrammarContext, GrammarError, Mask, Vocabulary, mask_size
from plugins.grammars.settings import XGrammarSettings
from plugins.grammars.token_ends import TokenEnds
from plugins.grammars.tokens import Once, Tokens, one_line
from plugins.grammars.xgrammar_text import TEXT_TAG, TOKEN_TAG, grammar_text

if TYPE_CHECKING:
    import xgrammar


class XGrammar:
    """The artifact is the grammar as text. With its masks it would be megabytes, and slower to read than to make:
    masks are made when they are first needed, and kept with the grammar."""

    Settings = XGrammarSettings

    def __init__(self, settings: XGrammarSettings, context: GrammarContext):
        if find_spec("xgrammar") is None:
            raise ConfigError("grammars=xgrammar needs a package: pip install nonet[xgrammar]", "grammars.xgrammar")
        self._max_whitespace = settings.max_whitespace
        cache_bytes = num_bytes(settings.cache_memory)
        self._tokens = Once(lambda: XGTokens(context.load_vocabulary(), cache_bytes))

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            return grammar_text(spec, self._max_whitespace, self._tokens().vocabulary).encode()
        except RecursionError as error:
            raise GrammarError("it has too many levels") from error

    def load(self, artifact: bytes) -> Grammar:
        text, tokens = artifact.decode(), self._tokens()
        if text.startswith(TEXT_TAG):
            return Grammar(tokens, _told(tokens.of_texts.compile_structural_tag, text.removeprefix(TEXT_TAG)))
        if text.startswith(TOKEN_TAG):
            compiled = _told(tokens.of_tokens.compile_structural_tag, text.removeprefix(TOKEN_TAG))
            return Grammar(tokens, compiled, takes_special=True)
        return Grammar(tokens, _told(tokens.of_texts.compile_grammar, text))


class XGTokens(Tokens):
    def __init__(self, vocabulary: Vocabulary, cache_bytes: int):
        super().__init__(vocabulary)
        self._cache_bytes = cache_bytes
        self.ends = TokenEnds(vocabulary)

    @cached_property
    def of_texts(self) -> xgrammar.GrammarCompiler:
        """To it control tokens are nothing: free text, which for xgrammar is any bytes, has none."""
        special = self.vocabulary.special_ids
        return self._compiler([b"" if at in special else token for at, token in enumerate(self.vocabulary.tokens)])

    @cached_property
    def of_tokens(self) -> xgrammar.GrammarCompiler:
        """To it they begin with a byte that no rule has, so they fit where a structure names their ids."""
        special = self.vocabulary.special_ids
        spelled = enumerate(self.vocabulary.tokens)
        return self._compiler([b"\xff" + token if at in special else token for at, token in spelled])

    def _compiler(self, tokens: list[bytes]) -> xgrammar.GrammarCompiler:
        # Imported here: it takes seconds, and brings torch.
        import xgrammar

        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary.vocab_size,
            stop_token_ids=sorted(self.vocabulary.eos_ids),
        )
        return xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=self._cache_bytes, enable_dynamic_compilation=True
        )


class Grammar:
    """See `core.stages.grammar.CompiledGrammar`."""

    def __init__(self, tokens: XGTokens, compiled: xgrammar.CompiledGrammar, takes_special: bool = False):
        self._tokens = tokens
        self._compiled = compiled
        self._never = frozenset() if takes_special else tokens.vocabulary.special_ids

    def matcher(self) -> XGMatcher:
        import xgrammar

        return XGMatcher(self._tokens, self._never, xgrammar.GrammarMatcher(self._compiled))


class XGMatcher:
    """See `core.stages.grammar.Matcher`. The end of the sequence is counted here: to xgrammar it is never told."""

    def __init__(self, tokens: XGTokens, never: frozenset[int], native: Any):
        self._tokens = tokens
        self._never = never  # ids that are not even shown to xgrammar, which would print that it does not know them
        self._native = native
        self._taken: list[int] = []
        self._ended = False

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if self._ended or not self._accept(token_id):
                return count
        return len(token_ids)

    def _accept(self, token_id: int) -> bool:
        vocabulary = self._tokens.vocabulary
        if token_id in vocabulary.eos_ids:
            self._ended = self._native.is_completed()
            return self._ended
        if not 0 <= token_id < len(vocabulary.tokens) or not vocabulary.tokens[token_id] or token_id in self._never:
            return False
        if not _told(self._native.accept_token, token_id):
            return False
        self._taken.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if self._ended and num_tokens:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            _told(self._native.rollback, num_tokens)
            del self._taken[len(self._taken) - num_tokens :]

    def fill(self, mask: Mask) -> None:
        if self._ended:
            mask[:] = 0
            return
        mask[:] = -1  # what is all allowed is not written
        _told(self._native.fill_next_token_bitmask, mask[None])
        if odd := self._tokens.vocabulary.vocab_size % 32:
            mask[-1] &= np.int32((1 << odd) - 1)
        if not mask.any():
            raise GrammarError("xgrammar finds nothing that may come next")

    def forced(self) -> tuple[int, ...]:
        if self._ended:
            return ()
        text = str(_told(self._native.find_jump_forward_string))
        if text:
            return self._ids(text)
        return self._tokens.end if self._native.is_completed() and self._only_ends() else ()

    def _ids(self, text: str) -> tuple[int, ...]:
        """What is left of the tokens of `text` without those that what follows could become part of."""
        ids = self._after_last(text)
        if ids is None:
            ids = self._tokens.vocabulary.encode(text)
        return tuple(self._tokens.ends.settled(ids))

    def _after_last(self, text: str) -> list[int] | None:
        """The ids of `text` in the encoding of the token before it and `text`, where that token comes out as it is."""
        if not self._taken:
            return None
        vocabulary, last = self._tokens.vocabulary, self._taken[-1]
        try:
            ids = vocabulary.encode(vocabulary.tokens[last].decode() + text)
        except UnicodeDecodeError:
            return None
        return ids[1:] if ids[:1] == [last] else None

    def _only_ends(self) -> bool:
        mask = np.zeros(mask_size(self._tokens.vocabulary.vocab_size), np.int32)
        self.fill(mask)
        return int(np.bitwise_count(mask.view(np.uint32)).sum()) == len(self._tokens.vocabulary.eos_ids)


def _told(call: Any, *arguments: object) -> Any:
    """xgrammar's own errors as those of a grammar."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        raise GrammarError(_in_one_line(error)) from error


def _in_one_line(error: Exception) -> str:
    """Without the time and the place in xgrammar's source that its messages begin with."""
    message = " ".join(str(error).split())
    return one_line(message.rpartition(": Check failed: ")[2].partition(".cc:")[0], "xgrammar cannot go on")
