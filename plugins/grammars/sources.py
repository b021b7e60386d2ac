"""The kinds of grammars that are rules whatever the backend: regular expressions, choices, EBNF."""

from __future__ import annotations

import json

from core.request import GrammarSpec
from core.stages.grammar import GrammarError
from plugins.grammars.gbnf import parse_gbnf
from plugins.grammars.regex import parse_regex
from plugins.grammars.rules import Rules, Text, alt


def rules_of(spec: GrammarSpec) -> Rules:
    """Raises GrammarError for what is not of its kind."""
    if spec.kind == "regex":
        return {"root": parse_regex(spec.source)}
    if spec.kind == "choice":
        return {"root": alt(map(Text, _choices(spec.source)))}
    if spec.kind == "ebnf":
        return parse_gbnf(spec.source)
    raise GrammarError(f"{spec.kind} is not supported")


def _choices(source: str) -> list[str]:
    try:
        found = json.loads(source)
        if (
            isinstance(found, list)
            and found
            and all(isinstance(text, str) and text.encode() is not None for text in found)
        ):
            return found
    except ValueError as error:  # half of a surrogate pair cannot be encoded
        raise GrammarError(f"choice: {error}") from error
    raise GrammarError("choice needs a list of texts, at least one")
