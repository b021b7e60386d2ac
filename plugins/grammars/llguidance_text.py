"""What a request asks for, in llguidance's notation: Lark's, with JSON schemas in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.grammar.regex.nodes import times
from core.grammar.schema.places import with_below
from core.request import GrammarSpec
from core.stages.grammar import Vocabulary
from core.stages.structural_tag import StructuralTag, Structure, parse_structural_tag
from plugins.grammars.json_numbers import for_llguidance
from plugins.grammars.json_strings import quoted
from plugins.grammars.json_text import COMMON_KEYWORDS, escapes_are_safe, parsed_schema, refuse_unenforced
from plugins.grammars.rules import Alt, Chars, Expr, Followed, Ref, Repeat, Rules, Seq, Text, is_regular, pruned
from plugins.grammars.sources import rules_of
from plugins.grammars.structures import special_parts

ENFORCED = COMMON_KEYWORDS | {"allOf", "multipleOf"}


def grammar_text(spec: GrammarSpec, max_whitespace: int, vocabulary: Vocabulary) -> str:
    """Raises GrammarError for what is not of its kind, or not supported."""
    if spec.kind == "structural_tag":
        return _Structural(parse_structural_tag(spec.source), vocabulary, _spacing(spec, max_whitespace)).text()
    if spec.kind in ("json_schema", "json_object"):
        schema = parsed_schema(spec.source) if spec.kind == "json_schema" else {"type": "object"}
        return json.dumps({"grammars": [{"json_schema": _json(schema, _spacing(spec, max_whitespace))}]})
    return lark(pruned(rules_of(spec)))


def _spacing(spec: GrammarSpec, max_whitespace: int) -> dict[str, object]:
    if spec.any_whitespace:
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{max_whitespace}}}"}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _json(schema: Any, spacing: dict[str, object]) -> dict[str, object]:
    """The names that an open object may have besides its own are held against escapes by none of llguidance's rules:
    where there are such names, no character is written as an escape that has another form."""
    refuse_unenforced(schema, ENFORCED)
    if escapes_are_safe(schema):
        escapes: dict[str, object] = {"json_allow_general_unicode_escapes": True}
    else:
        escapes = {"json_allowed_escapes": 'nrbtf\\"'}
    plain = _with_numbers(schema) if isinstance(schema, dict) else {} if schema else {"enum": []}
    return {**plain, "x-guidance": {**spacing, **escapes}}


def _with_numbers(schema: Any) -> Any:
    return for_llguidance(with_below(schema, _with_numbers)) if isinstance(schema, dict) else schema


def lark(rules: Rules) -> str:
    """A regular language as one lexeme. Any other by single characters: lexemes take as much as they can, which leaves out
    texts that a longer look at a rule would find."""
    is_lexeme = is_regular(rules)
    names = {name: f"R{at}" if is_lexeme else f"r{at}" for at, name in enumerate(rules)}
    literal = quoted if is_lexeme else _by_characters
    lines = [f"{names[name]}: {_expr(expr, names, literal)}" for name, expr in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines])


def _expr(expr: Expr, names: Mapping[str, str], literal: Callable[[str], str]) -> str:
    match expr:
        case Text(text):
            return literal(text)
        case Chars(ranges):
            return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]/"
        case Ref(name):
            return names[name]
        case Seq(parts):
            return " ".join(_expr(part, names, literal) for part in parts) or '""'
        case Alt(options):
            return "(" + " | ".join(_expr(option, names, literal) for option in options) + ")"
        case Repeat(part, least, most):
            return f"({_expr(part, names, literal)}){times(least, most)}"
        case Followed(part):
            return _expr(part, names, literal)


def _by_characters(text: str) -> str:
    return " ".join(map(quoted, text)) or '""'


class _Structural:
    """Free text is a lexeme that ends with a trigger as soon as one is there: see llguidance's lazy lexemes."""

    def __init__(self, tag: StructuralTag, vocabulary: Vocabulary, spacing: dict[str, object]):
        self._tag = tag
        self._vocabulary = vocabulary
        self._spacing = spacing

    def text(self) -> str:
        tag = self._tag
        rules = ["%llguidance {}", f"start: {self._start()}"]
        if tag.has_free_text:
            rules += ["FREE: /(?s:.*)/", *self._heads()]
        rules += [f"body{at}: {self._body(one)}" for at, one in enumerate(tag.structures)]
        return "\n".join(rules)

    def _start(self) -> str:
        tag = self._tag
        if tag.has_free_text:
            called = self._options(lambda at, one: f"head{self._trigger(one)} body{at}")
            return f"FREE | {called}" if tag.stop_after_first else f"{called}* FREE"
        first = self._options(lambda at, one: f"{self._literal(self._tag.trigger_of(one))} body{at}")
        if tag.stop_after_first:
            return first
        return f"{first} ({self._literal(tag.separator)} {first})*"

    def _options(self, write: Callable[[int, Structure], str]) -> str:
        return "(" + " | ".join(write(at, one) for at, one in enumerate(self._tag.structures)) + ")"

    def _trigger(self, structure: Structure) -> int:
        return self._tag.triggers.index(self._tag.trigger_of(structure))

    def _heads(self) -> Sequence[str]:
        used = {self._trigger(one) for one in self._tag.structures}
        return [self._head(at, trigger) for at, trigger in enumerate(self._tag.triggers) if at in used]

    def _head(self, at: int, trigger: str) -> str:
        parts = special_parts(trigger, self._vocabulary)
        if isinstance(parts[0], str):
            rest = self._literal(trigger[len(parts[0]) :])
            return f"lead{at}[lazy]: FREE {quoted(parts[0])}\nhead{at}: lead{at} {rest}"
        return f"head{at}: FREE {self._literal(trigger)}"

    def _body(self, structure: Structure) -> str:
        rest = structure.begin[len(self._tag.trigger_of(structure)) :]
        schema = json.dumps(_json(structure.schema, self._spacing))
        return f"{self._literal(rest)} %json {schema} {self._literal(structure.end)}"

    def _literal(self, text: str) -> str:
        parts = special_parts(text, self._vocabulary)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in parts if part != "")
