"""What test files of this folder share."""

from __future__ import annotations

import pytest

from core.stages.grammar import GrammarBackend, GrammarContext
from core.testing.grammar_examples import vocabularies
from plugins.grammars.llguidance_backend import LLGuidance


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    """Both grammar backends, over the first of the vocabularies."""
    context = GrammarContext(lambda: vocabularies()[0])
    if request.param == "llguidance":
        return LLGuidance(LLGuidance.Settings(), context)
    pytest.importorskip("xgrammar", reason="pip install nonet[xgrammar]")
    from plugins.grammars.xgrammar_backend import XGrammar

    return XGrammar(XGrammar.Settings(), context)
