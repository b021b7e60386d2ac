"""JSON schemas to rules, for a backend whose own reading of them leaves things out.

Properties come in the schema's order, those that only `required` names after them, others last. A name that is told apart from
others has one spelling, so that none comes back as an escape. White space is bounded between any two tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.grammar.schema.words import TYPES
from core.stages.grammar import GrammarError
from plugins.grammars.json_numbers import INTEGER, NUMBER, integers
from plugins.grammars.json_strings import CHARACTER, PLAIN, REST, STRING, Names, encoded, quoted
from plugins.grammars.json_text import COMMON_KEYWORDS, refuse_unenforced
from plugins.grammars.regex import parse_regex
from plugins.grammars.rules import EMPTY, NOTHING, Expr, Ref, Repeat, Rules, Text, alt, chars, matches, seq

ANYTHING = Ref("any")
MAX_RULES = 20_000


def json_rules(schema: Any, max_whitespace: int | None) -> Rules:
    """The values of `schema`; `max_whitespace` None: ", " and ": ", and nothing else."""
    refuse_unenforced(schema, COMMON_KEYWORDS)
    return _Writer(schema, max_whitespace).rules()


class _Writer:
    def __init__(self, schema: Any, max_whitespace: int | None):
        self._schema = schema
        space = chars([(0x20, 0x20), (0x09, 0x0A), (0x0D, 0x0D)])
        self._space: Expr = EMPTY if max_whitespace is None else Repeat(space, 0, max_whitespace)
        self._comma = Text(", ") if max_whitespace is None else seq([Ref("space"), Text(","), Ref("space")])
        self._colon = Text(": ") if max_whitespace is None else seq([Ref("space"), Text(":"), Ref("space")])
        base = {"space": self._space, "rest": REST, "plain": PLAIN, "string": STRING, "number": NUMBER}
        self._rules: dict[str, Expr] = dict(base)
        self._referred: dict[str, Ref] = {}

    def rules(self) -> Rules:
        self._rules["root"] = NOTHING  # holds the first place
        members = seq([Ref("string"), self._colon, ANYTHING])
        lists = self._brackets("[", "]", self._listed(ANYTHING, 1, None), True)
        objects = self._brackets("{", "}", self._listed(members, 1, None), True)
        words = [Text("null"), Text("true"), Text("false")]
        self._rules["any"] = alt([*words, Ref("number"), Ref("string"), lists, objects])
        self._rules["root"] = self._value(self._schema)
        return self._rules

    def _named(self, expr: Expr) -> Ref:
        if len(self._rules) >= MAX_RULES:
            raise GrammarError("the schema is too large")
        name = f"rule{len(self._rules)}"
        self._rules[name] = expr
        return Ref(name)

    def _value(self, schema: Any) -> Expr:
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        says = {keyword: value for keyword, value in schema.items() if keyword in COMMON_KEYWORDS}
        if not says:
            return ANYTHING
        for keyword in ("$ref", "anyOf"):
            if keyword in says:
                if len(says) > 1:
                    raise GrammarError(
                        f"{keyword} beside {next(one for one in says if one != keyword)} is not supported"
                    )
                return self._reference(says["$ref"]) if keyword == "$ref" else self._any_of(says["anyOf"])
        if "enum" in says or "const" in says:
            return self._constants(says)
        return self._named(alt(self._of_type(one, says) for one in self._types(says)))

    def _any_of(self, schemas: Any) -> Expr:
        if not isinstance(schemas, list) or not schemas:
            raise GrammarError("anyOf needs a list of schemas")
        return alt([self._value(one) for one in schemas])

    def _reference(self, target: Any) -> Ref:
        if target not in self._referred:
            place = self._defined(target)
            self._referred[target] = ref = self._named(NOTHING)
            self._rules[ref.name] = self._value(place)
        return self._referred[target]

    def _defined(self, target: Any) -> Any:
        name = target.removeprefix("#/$defs/") if isinstance(target, str) else ""
        definitions = self._schema.get("$defs", {})
        if not name or name == target or not isinstance(definitions, dict) or name not in definitions:
            raise GrammarError(f"$ref to {str(target)[:80]} is not supported: only to one of the schema's $defs")
        return definitions[name]

    def _types(self, says: Mapping[str, Any]) -> Sequence[str]:
        types = says.get("type", [one for one in TYPES if one != "integer"])
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(one in TYPES for one in types):
            raise GrammarError(f"type {json.dumps(says['type'])[:80]} is none of {', '.join(TYPES)}")
        return [one for one in types if one != "integer" or "number" not in types]

    def _constants(self, says: Mapping[str, Any]) -> Expr:
        if more := says.keys() - {"enum", "const", "type"}:
            raise GrammarError(f"{min(more)} beside enum or const is not supported")
        if "enum" in says and "const" in says:
            raise GrammarError("enum beside const is not supported")
        values = says["enum"] if "enum" in says else [says["const"]]
        if not isinstance(values, list):
            raise GrammarError("enum needs a list of values")
        types = self._types(says) if "type" in says else TYPES
        return alt([self._constant(one) for one in values if any(_is_of(one, type_) for type_ in types)])

    def _constant(self, value: Any) -> Expr:
        if isinstance(value, str):
            return Text(quoted(value))
        if isinstance(value, list):
            return self._brackets("[", "]", self._joined([self._constant(one) for one in value]), not value)
        if isinstance(value, dict):
            members = [seq([Text(quoted(name)), self._colon, self._constant(one)]) for name, one in value.items()]
            return self._brackets("{", "}", self._joined(members), not value)
        try:
            return Text(json.dumps(value, allow_nan=False))
        except ValueError as error:
            raise GrammarError("a number is too large") from error

    def _of_type(self, type_: str, says: Mapping[str, Any]) -> Expr:
        if type_ == "string":
            return self._string(says)
        if type_ == "array":
            return self._array(says)
        if type_ == "object":
            return self._object(says)
        if type_ in ("integer", "number"):
            return self._number(type_, says)
        return Text("null") if type_ == "null" else alt([Text("true"), Text("false")])

    def _number(self, type_: str, says: Mapping[str, Any]) -> Expr:
        bounds = [says.get(one) for one in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
        if all(bound is None for bound in bounds):
            return INTEGER if type_ == "integer" else Ref("number")
        if type_ == "number":
            raise GrammarError("bounds of a number that is no integer are not supported")
        return integers(*bounds)

    def _string(self, says: Mapping[str, Any]) -> Expr:
        least, most = _count(says, "minLength", 0), _count(says, "maxLength", None)
        if "pattern" in says:
            if least or most is not None:
                raise GrammarError("a length beside pattern is not supported")
            return self._named(seq([Text('"'), encoded(_pattern(says["pattern"])), Text('"')]))
        if not least and most is None:
            return Ref("string")
        return seq([Text('"'), _repeat(CHARACTER, least or 0, most), Text('"')])

    def _array(self, says: Mapping[str, Any]) -> Expr:
        least, most = _count(says, "minItems", 0) or 0, _count(says, "maxItems", None)
        first = says.get("prefixItems", [])
        if not isinstance(first, list) or isinstance(says.get("items"), list):
            raise GrammarError("prefixItems needs a list of schemas, and items one schema")
        known = [self._value(one) for one in first[: most if most is not None else len(first)]]
        rest = self._value(says.get("items", True)) if most is None or most > len(known) else NOTHING
        more = None if most is None else most - len(known)
        tail = _repeat(seq([self._comma, rest]), max(least - len(known), 0), more)
        for at in range(len(known) - 1, 0, -1):
            tail = self._named(alt([seq([self._comma, known[at], tail]), *([EMPTY] if at >= least else [])]))
        if known:
            return self._brackets("[", "]", seq([known[0], tail]), least == 0)
        return self._brackets("[", "]", self._listed(rest, least, most), least == 0)

    def _object(self, says: Mapping[str, Any]) -> Expr:
        required = says.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise GrammarError("required needs a list of names")
        properties, others = says.get("properties", {}), says.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise GrammarError("properties needs an object of schemas")
        names = list(dict.fromkeys([*properties, *required]))
        low, high = self._more(says, names, set(required))
        if high is not None and high < 0:
            return NOTHING
        members = [(self._member(quoted(one), properties.get(one, others)), one in required) for one in names]
        other = self._by_pattern(says, names) if says.get("patternProperties") else self._others(others, names)
        return self._members(members, other, low, high)

    def _more(self, says: Mapping[str, Any], names: Sequence[str], required: set[str]) -> tuple[int, int | None]:
        """How many properties there may be beside those with names of their own."""
        least, most = _count(says, "minProperties", 0) or 0, _count(says, "maxProperties", None)
        low, optional = max(least - len(required), 0), len(names) - len(required)
        if optional and low:
            raise GrammarError("minProperties beside properties that may be left out is not supported")
        if most is None or not optional:
            return low, None if most is None else most - len(required)
        if says.get("additionalProperties", True) is not False or most < len(names):
            raise GrammarError("maxProperties beside properties that may be left out is not supported")
        return low, None

    def _by_pattern(self, says: Mapping[str, Any], names: Sequence[str]) -> Expr:
        if len(says["patternProperties"]) != 1 or says.get("additionalProperties", True) is not False:
            raise GrammarError(
                "patternProperties is not supported, but for one pattern beside additionalProperties: false"
            )
        ((pattern, schema),) = says["patternProperties"].items()
        language = _pattern(pattern)
        if any(matches(language, name) for name in names):
            raise GrammarError("patternProperties for names that are among the properties is not supported")
        key = self._named(seq([Text('"'), encoded(language), Text('"')]))
        return self._named(seq([key, self._colon, self._value(schema)]))

    def _member(self, name: str, schema: Any) -> Expr:
        return self._named(seq([Text(name), self._colon, self._value(schema)]))

    def _others(self, schema: Any, names: Sequence[str]) -> Expr:
        if schema is False:
            return NOTHING
        key: Expr = Names(names, self._named).expr() if names else Ref("string")
        return self._named(seq([key, self._colon, self._value(schema)]))

    def _members(self, members: Sequence[tuple[Expr, bool]], other: Expr, low: int, high: int | None) -> Expr:
        """One after the other, those that may be left out with and without: what follows depends on whether one was there."""
        more = seq([self._comma, other])
        after = self._named(_repeat(more, low, high))
        first: Expr = NOTHING
        if high != 0:
            first = seq([other, _repeat(more, max(low - 1, 0), None if high is None else high - 1)])
        empty = not low
        for member, is_required in reversed(members):
            begun = seq([member, after])
            first = begun if is_required else self._named(alt([begun, first]))
            empty = empty and not is_required
            next_ = seq([self._comma, member, after])
            after = self._named(next_ if is_required else alt([next_, after]))
        return self._brackets("{", "}", first, empty)

    def _brackets(self, opening: str, closing: str, content: Expr, may_be_empty: bool) -> Expr:
        space = Ref("space")
        full: Expr = NOTHING
        if content != EMPTY:
            full = seq([Text(opening), space, content, space, Text(closing)])
        return alt([full, *([seq([Text(opening), space, Text(closing)])] if may_be_empty else [])])

    def _listed(self, item: Expr, least: int, most: int | None) -> Expr:
        if most == 0:
            return NOTHING
        return seq([item, _repeat(seq([self._comma, item]), max(least - 1, 0), None if most is None else most - 1)])

    def _joined(self, items: Iterable[Expr]) -> Expr:
        parts = [part for item in items for part in (self._comma, item)]
        return seq(parts[1:])


def _pattern(pattern: Any) -> Expr:
    if not isinstance(pattern, str):
        raise GrammarError("pattern needs a text")
    return parse_regex(pattern, anywhere=True)


def _repeat(expr: Expr, least: int, most: int | None) -> Expr:
    if most is not None and most < least:
        return NOTHING
    return EMPTY if most == 0 else Repeat(expr, least, most)


def _count(says: Mapping[str, Any], keyword: str, default: int | None) -> int | None:
    value = says.get(keyword, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise GrammarError(f"{keyword} needs a whole number, not {json.dumps(value)[:80]}")
    return int(value)


def _is_of(value: Any, type_: str) -> bool:
    if isinstance(value, bool):
        return type_ == "boolean"
    if isinstance(value, int | float):
        return type_ == "number" or (type_ == "integer" and value == value // 1)
    return {"null": value is None, "string": isinstance(value, str)}.get(
        type_, isinstance(value, list) if type_ == "array" else type_ == "object" and isinstance(value, dict)
    )
