"""What a request asks for, in xgrammar's notation: EBNF, or a structural tag with EBNF in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from core.grammar.regex.nodes import times
from core.request import GrammarSpec
from core.stages.grammar import GrammarError, Vocabulary
from core.stages.structural_tag import StructuralTag, Structure, parse_structural_tag
from plugins.grammars.json_rules import json_rules
from plugins.grammars.json_text import parsed_schema
from plugins.grammars.rules import Alt, Chars, Expr, Followed, Ref, Repeat, Rules, Seq, Text, pruned
from plugins.grammars.sources import rules_of
from plugins.grammars.structures import special_parts

TEXT_TAG, TOKEN_TAG = "text:", "token:"
"""How a structural tag begins: control tokens stand in the second kind alone."""
_BY_NUMBER = frozenset(map(ord, "]^[-"))  # they mean something in a class


def grammar_text(spec: GrammarSpec, max_whitespace: int, vocabulary: Vocabulary) -> str:
    """EBNF, or for a structural tag TEXT_TAG or TOKEN_TAG and JSON. Raises GrammarError for what is not of its kind, or not
    supported."""
    spaces = max_whitespace if spec.any_whitespace else None
    if spec.kind == "structural_tag":
        return _Structural(parse_structural_tag(spec.source), vocabulary, spaces).text()
    if spec.kind in ("json_schema", "json_object"):
        schema = parsed_schema(spec.source) if spec.kind == "json_schema" else {"type": "object"}
        return ebnf(pruned(json_rules(schema, spaces)))
    return ebnf(pruned(rules_of(spec)))


def ebnf(rules: Rules) -> str:
    names = {name: "root" if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    return "\n".join(f"{names[name]} ::= {_expr(expr, names)}" for name, expr in rules.items())


def _expr(expr: Expr, names: Mapping[str, str]) -> str:
    match expr:
        case Text(text):
            return '"' + "".join(map(_character, map(ord, text))) + '"'
        case Chars(ranges):
            return "[" + "".join(f"{_character(low)}-{_character(high)}" for low, high in ranges) + "]"
        case Ref(name):
            return names[name]
        case Seq(parts):
            return " ".join(_expr(part, names) for part in parts) or '""'
        case Alt(options):
            return "(" + " | ".join(_expr(option, names) for option in options) + ")"
        case Repeat(part, least, most):
            return f"({_expr(part, names)}){times(least, most)}"
        case Followed(part, by):  # xgrammar's lookahead assertion: without one, masks take milliseconds
            return f"({_expr(part, names)}) (={_expr(by, names)})"


def _character(code: int) -> str:
    if code in (0x22, 0x5C):
        return "\\" + chr(code)
    if 0x20 <= code < 0x7F and code not in _BY_NUMBER:
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Structural:
    """A control token begins a structure of its own kind: xgrammar looks for texts or for tokens, not for both."""

    def __init__(self, tag: StructuralTag, vocabulary: Vocabulary, max_whitespace: int | None):
        self._tag = tag
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._has_tokens = False

    def text(self) -> str:
        format_ = self._free() if self._tag.has_free_text else self._strict()
        if self._has_tokens and format_["type"] == "triggered_tags":
            raise GrammarError("structural tag: a control token where texts are the triggers is not supported")
        return (TOKEN_TAG if self._has_tokens else TEXT_TAG) + json.dumps({"type": "structural_tag", "format": format_})

    def _free(self) -> dict[str, object]:
        tag = self._tag
        triggers = dict.fromkeys(tag.trigger_of(one) for one in tag.structures)
        begins = [special_parts(trigger, self._vocabulary) for trigger in triggers]
        token_ids = [begin[0] for begin in begins if isinstance(begin[0], int) and len(begin) == 1]
        found: dict[str, object] = {"type": "triggered_tags", "triggers": list(triggers)}
        if len(token_ids) == len(begins):
            excluded = sorted(self._no_text().difference(token_ids))
            found = {"type": "token_triggered_tags", "trigger_tokens": token_ids, "exclude_tokens": excluded}
        elif any(isinstance(part, int) for begin in begins for part in begin):
            raise GrammarError("structural tag: triggers with control tokens beside other text are not supported")
        tags = [self._triggered(one) for one in tag.structures]
        return {**found, "tags": tags, "stop_after_first": tag.stop_after_first}

    def _no_text(self) -> set[int]:
        """xgrammar's free text of tokens is any of them."""
        vocabulary = self._vocabulary
        empty = {at for at in range(vocabulary.vocab_size) if at >= len(vocabulary.tokens) or not vocabulary.tokens[at]}
        return empty | vocabulary.special_ids | vocabulary.eos_ids

    def _triggered(self, structure: Structure) -> dict[str, object]:
        trigger = self._tag.trigger_of(structure)
        (begin,) = self._parts(trigger)
        content = self._content(structure, structure.begin[len(trigger) :])
        return {
            "type": "tag",
            "begin": trigger if begin["type"] == "const_string" else begin,
            "content": content,
            "end": "",
        }

    def _strict(self) -> dict[str, object]:
        one: dict[str, object] = {"type": "or", "elements": [self._content(s, s.begin) for s in self._tag.structures]}
        if self._tag.stop_after_first:
            return one
        again = {"type": "sequence", "elements": [*self._parts(self._tag.separator), one]}
        return {"type": "sequence", "elements": [one, {"type": "star", "content": again}]}

    def _content(self, structure: Structure, begin: str) -> dict[str, object]:
        grammar = {"type": "grammar", "grammar": ebnf(pruned(json_rules(structure.schema, self._max_whitespace)))}
        return {"type": "sequence", "elements": [*self._parts(begin), grammar, *self._parts(structure.end)]}

    def _parts(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in special_parts(text, self._vocabulary):
            if isinstance(part, int):
                self._has_tokens = True
                found.append({"type": "token", "token": part})
            elif part:
                found.append({"type": "const_string", "value": part})
        return found
