"""The built-in grammar backends keep the contract, and more of it than is asked of all."""

from __future__ import annotations

import random

import pytest

from core.request import GRAMMAR_KINDS, GrammarSpec
from core.stages.grammar import GrammarError
from core.testing.grammar import GrammarContract
from core.testing.grammar_walks import segmented
from plugins.grammars.llguidance_backend import LLGuidance


class Whole(GrammarContract):
    provides = frozenset(GRAMMAR_KINDS)

    def test_texts_fit_in_any_tokens(self) -> None:
        rng = random.Random(4)
        for case in self.cases():
            for text in case.example.texts:
                for _ in range(4):
                    ids = segmented(case.vocabulary, text, rng)
                    done = case.grammar.matcher().accept([*ids, min(case.vocabulary.eos_ids)])
                    assert done == len(ids) + 1, f"{case.name}: {case.show(ids[:done])} fits, and no more of {text!r}"


class Modest(LLGuidance):
    """An honest stranger: what it cannot hold a text to, it refuses."""

    def compile(self, spec: GrammarSpec) -> bytes:
        if "maxItems" in spec.source:
            raise GrammarError("maxItems is not supported")
        return super().compile(spec)


class TestModest(GrammarContract):
    component = Modest
    provides = frozenset({"json_schema"})


class TestLLGuidance(Whole):
    component = LLGuidance


class TestXGrammar(Whole):
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("xgrammar", reason="pip install nonet[xgrammar]")
        from plugins.grammars.xgrammar_backend import XGrammar

        type(self).component = XGrammar


del Whole
