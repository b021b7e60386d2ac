"""Built-in grammar backends."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl
from core.request import GRAMMAR_KINDS

NONET_API = API_VERSION


@hookimpl
def provide_grammars() -> Iterable[Component]:
    # The first is selected by default, so neither requires a sampler that obeys grammars: with another one, a request that has
    # one is refused by name.
    yield Component(
        "llguidance",
        "plugins.grammars.llguidance_backend:LLGuidance",
        "masks from a lazy lexer and an Earley parser; nothing to precompute",
        settings="plugins.grammars.settings:LLGuidanceSettings",
        provides=GRAMMAR_KINDS,
    )
    yield Component(
        "xgrammar",
        "plugins.grammars.xgrammar_backend:XGrammar",
        "masks precomputed for each state of a pushdown automaton",
        settings="plugins.grammars.settings:XGrammarSettings",
        provides=GRAMMAR_KINDS,
    )
